// Stands in for horovod/common/parameter_manager.h, which brings a numerics library for tuning: fixed parameters.
#pragma once

// Horovod has these from that library's headers.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <numeric>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

namespace horovod {
namespace common {

class ParameterManager {
public:
  struct Params {};
  void Initialize(int32_t, int32_t, const std::string&) {}
  void SetAutoTuning(bool) {}
  bool IsAutoTuning() const { return false; }
  bool HierarchicalAllreduce() const { return false; }
  void SetHierarchicalAllreduce(bool, bool = false) {}
  bool HierarchicalAllgather() const { return false; }
  void SetHierarchicalAllgather(bool, bool = false) {}
  bool TorusAllreduce() const { return false; }
  void SetTorusAllreduce(bool, bool = false) {}
  int64_t TensorFusionThresholdBytes() const { return 0; }
  void SetTensorFusionThresholdBytes(int64_t, bool = false) {}
  double CycleTimeMs() const { return 0.2; }
  void SetCycleTimeMs(double, bool = false) {}
  bool CacheEnabled() const { return cache_enabled_; }
  void SetCacheEnabled(bool enabled, bool = false) { cache_enabled_ = enabled; }
  bool Update(const std::vector<std::string>&, int64_t) { return false; }
  Params GetParams() { return {}; }
  void SetParams(const Params&) {}
  void Reset() {}

private:
  std::atomic<bool> cache_enabled_{true};
};

} // namespace common
} // namespace horovod
