// What an operator costs: the stream's thread sleeps, so that eight devices run on two cores.
#include "emulated.h"
namespace emu {
static double bytes_of(const std::vector<c10::IValue>& values) {
  double bytes = 0;
  for (auto& value : values)
    map_iv(value, [&](const at::Tensor& t) {
      if (t.defined()) bytes += (double)t.nbytes();
      return t;
    });
  return bytes;
}
static double cost_us(const std::string& name, const torch::jit::Stack& st, const std::vector<c10::IValue>& made) {
  auto& c = cfg();
  if (!c.cost.empty()) {
    std::lock_guard<std::mutex> l(c.m);
    auto i = c.cost.find(name);
    if (i != c.cost.end()) return i->second;
  }
  double us = c.op_us;
  if (c.flops_per_us > 0 && (name == "aten::mm" || name == "aten::addmm" || name == "aten::bmm")) {
    int k = name == "aten::addmm" ? 1 : 0;
    auto a = st[k].toTensor(), b = st[k + 1].toTensor();
    us += 2.0 * a.numel() * b.size(-1) / c.flops_per_us;
  } else if (c.bytes_per_us > 0) {
    us += (bytes_of(st) + bytes_of(made)) / c.bytes_per_us;
  }
  c.charged_ns += (int64_t)(us * 1e3);
  return us;
}
static void run_on(int d, double us, const Task& f) {
  std::unique_lock<std::mutex> l(dev(d).compute, std::defer_lock);
  if (cfg().serial) l.lock();
  auto t0 = Clock::now();
  if (!cfg().skip_compute) f();
  if (us > 0) std::this_thread::sleep_until(t0 + std::chrono::nanoseconds((int64_t)(us * 1e3)));
}
}  // namespace emu
