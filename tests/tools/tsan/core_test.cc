// Process sets come and go while threads use them, and Horovod is shut down and started again in the middle of it.
//
// Usage: core_test ROUNDS CHANGES. Exit status 0 if every tensor that was accepted was answered, once; 1 with a line on
// standard error if not. ThreadSanitizer, with which this is built, has an exit status of its own for races.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "operations.h"

using namespace horovod::common;

namespace {

constexpr int USERS = 3;
constexpr int NO_SET = -1;

class Floats : public Tensor {
public:
  const DataType dtype() const override { return HOROVOD_FLOAT32; }
  const TensorShape shape() const override {
    TensorShape shape;
    shape.AddDim(static_cast<int64_t>(values_.size()));
    return shape;
  }
  const void* data() const override { return values_.data(); }
  int64_t size() const override { return static_cast<int64_t>(values_.size() * sizeof(float)); }

private:
  std::vector<float> values_ = std::vector<float>(4);
};

class Nowhere : public OpContext {
public:
  Status AllocatePersistent(int64_t, std::shared_ptr<PersistentBuffer>*) override { return Status::Aborted("unused"); }
  Status AllocateOutput(TensorShape, std::shared_ptr<Tensor>* tensor, std::shared_ptr<ReadyEvent>*) override {
    *tensor = std::make_shared<Floats>();
    return Status::OK();
  }
  Status AllocateZeros(int64_t, DataType, std::shared_ptr<Tensor>* tensor) override {
    *tensor = std::make_shared<Floats>();
    return Status::OK();
  }
  Framework framework() const override { return Framework::PYTORCH; }
};

struct Counts {
  std::atomic<long> accepted{0}, answered{0}, refused{0}, reduced{0}, made{0};
};

// What a training thread does with a set, whether it is still there or not.
void Use(int id, int number, Counts& counts) {
  int ranks[8];
  horovod_process_set_rank(id);
  horovod_process_set_included(id);
  horovod_process_set_ranks(id, ranks);
  auto status = EnqueueTensorAllreduce(
      std::make_shared<Nowhere>(), std::make_shared<Floats>(), std::make_shared<Floats>(), ReadyEventList(),
      "tensor." + std::to_string(number), CPU_DEVICE_ID,
      [&counts](const Status& result) {
        ++counts.answered;
        counts.reduced += result.ok();
      },
      ReduceOp::SUM, 1.0, 1.0, id);
  ++(status.ok() ? counts.accepted : counts.refused);
}

void User(int user, const std::atomic<int>& set, const std::atomic<bool>& stop, Counts& counts) {
  for (int number = 0; !stop; ++number) {
    int id = set;
    if (id != NO_SET) {
      Use(id, USERS * (number % 500) + user, counts);
    } else {
      std::this_thread::yield();
    }
  }
}

// Adds and removes sets, until Horovod shuts down under it.
void Changer(int changes, std::atomic<int>& set, std::atomic<int>& done, Counts& counts) {
  for (; done < changes; ++done) {
    int ranks[2] = {0, 1 + done % 7};
    int id = horovod_add_process_set(ranks, 2);
    if (id < 0) {
      return;
    }
    ++counts.made;
    horovod_set_idle_cycle_ms(2 * (done % 3));
    set = id;
    std::this_thread::sleep_for(std::chrono::microseconds(500));
    // Those who use it learn of the removal only now and then.
    if (done % 2 == 0) {
      set = NO_SET;
    }
    if (horovod_remove_process_set(id) < 0) {
      return;
    }
  }
}

// Horovod from start to shutdown, which comes while everybody is at it.
void Round(int changes, Counts& counts) {
  std::atomic<int> set{NO_SET}, done{0};
  std::atomic<bool> stop{false};
  if (!horovod_init(nullptr, 0, nullptr, nullptr, 0)) {
    std::fprintf(stderr, "Horovod was not initialized\n");
    std::exit(1);
  }
  std::vector<std::thread> threads;
  for (int user = 0; user < USERS; ++user) {
    threads.emplace_back(User, user, std::cref(set), std::cref(stop), std::ref(counts));
  }
  threads.emplace_back(Changer, changes, std::ref(set), std::ref(done), std::ref(counts));
  while (done < changes / 2) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  // Horovod's thread ends while sets are used and changed; the threads end before Horovod is started again.
  std::thread end([] { horovod_shutdown(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  stop = true;
  for (auto& thread : threads) {
    thread.join();
  }
  end.join();
}

} // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: core_test ROUNDS CHANGES\n");
    return 2;
  }
  setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1", 1);
  setenv("HOROVOD_CONTROLLER", "gloo", 1);
  setenv("HOROVOD_CPU_OPERATIONS", "gloo", 1);
  setenv("HOROVOD_LOG_LEVEL", "fatal", 1);
  Counts counts;
  for (int round = 0; round < std::atoi(argv[1]); ++round) {
    Round(std::atoi(argv[2]), counts);
  }
  std::printf("sets %ld, accepted %ld, answered %ld, reduced %ld, refused %ld\n", counts.made.load(),
              counts.accepted.load(), counts.answered.load(), counts.reduced.load(), counts.refused.load());
  if (counts.accepted != counts.answered || counts.reduced == 0) {
    std::fprintf(stderr, "lost: %ld tensors were accepted and %ld answered\n", counts.accepted.load(),
                 counts.answered.load());
    return 1;
  }
  return 0;
}
