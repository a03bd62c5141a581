// Stands in for horovod/common/gloo/gloo_controller.h: the others always agree with this process.
#pragma once

#include "../controller.h"
#include "gloo_context.h"

namespace horovod {
namespace common {

class GlooController : public Controller {
public:
  GlooController(ResponseCache& response_cache, TensorQueue& tensor_queue, Timeline& timeline,
                 ParameterManager& parameter_manager, GroupTable& group_table,
                 TimelineController& timeline_controller, GlooContext& gloo_context)
      : Controller(response_cache, tensor_queue, timeline, parameter_manager, group_table, timeline_controller),
        gloo_context_(gloo_context) {}

  int GetTypeSize(DataType) override { return 4; }
  void CrossRankBitwiseAnd(std::vector<long long>&, int) override {}
  void CrossRankBitwiseOr(std::vector<long long>&, int) override {}
  void RecvReadyTensors(std::vector<std::string>&, std::vector<RequestList>&) override {}
  void SendFinalTensors(ResponseList&) override {}
  void SendReadyTensors(RequestList&) override {}
  void RecvFinalTensors(ResponseList&) override {}
  void Bcast(void*, size_t, int, Communicator) override {}
  void AlltoallGetRecvSplits(const std::vector<int32_t>&, std::vector<int32_t>&) override {}
  void Barrier(Communicator) override {}

  void Allgather2Ints(std::array<int, 2> values, std::vector<int>& recv_values) override {
    for (size_t at = 0; at + 1 < recv_values.size(); at += 2) {
      recv_values[at] = values[0];
      recv_values[at + 1] = values[1];
    }
  }

protected:
  void DoInitialization() override {
    size_ = gloo_context_.ctx->size;
    is_coordinator_ = true;
    is_homogeneous_ = true;
  }

  GlooContext& gloo_context_;
};

} // namespace common
} // namespace horovod
