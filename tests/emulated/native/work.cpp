// The handle of a transfer: waiting blocks the current stream, not the host.
#include "emulated.h"
namespace emu {
using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;
using Tensors = std::vector<at::Tensor>;

struct EWork final : Work {
  EventPtr ev;
  uint64_t v;
  int dev;
  Tensors outs;
  c10::intrusive_ptr<c10::ivalue::Future> fut;
  EWork(int rank, c10d::OpType t, EventPtr e, uint64_t v, int dev, Tensors o)
      : Work(rank, t), ev(e), v(v), dev(dev), outs(std::move(o)) {}
  bool isCompleted() override {
    std::lock_guard<std::mutex> l(ev->m);
    return ev->done >= v;
  }
  bool isSuccess() const override { return true; }
  void synchronize() override { stream_wait(ev, v, dev, cur_stream(dev)); }
  bool wait(std::chrono::milliseconds) override {
    raise_error(dev);
    synchronize();
    return true;
  }  // the host does not block
  void abort() override {}
  Tensors result() override { return outs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return fut; }
};
}  // namespace emu
