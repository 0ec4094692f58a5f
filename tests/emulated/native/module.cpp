// What Python sees.
#include "emulated.h"
namespace emu {
static void each_stream(const std::function<void(StreamImpl&)>& visit) {
  for (int d = 0; d < cfg().ndev; d++)
    for (int64_t i = 0; i < kStreams; i++) visit(stream(d, i));
}

static void set(const std::string& name, double v) {
  auto& c = cfg();
  static const std::map<std::string, std::function<void(double)>> known{
      {"async", [&](double v) { c.async = v; }},
      {"lazy",
       [&](double v) {
         c.lazy = v;
         if (used) each_stream([](StreamImpl& s) { s.nudge(); });  // a process that has no device yet may still fork
       }},
      {"jitter_us", [&](double v) { c.jitter_us = v; }},
      {"seed", [&](double v) { c.seed = v; }},
      {"poison", [&](double v) { c.poison = v; }},
      {"skip_compute", [&](double v) { c.skip_compute = v; }},
      {"serial", [&](double v) { c.serial = v; }},
      {"queue_limit", [&](double v) { c.queue_limit = v; }},
      {"sync_mode", [&](double v) { c.sync_mode = v; }},
      {"capacity", [&](double v) { c.capacity = (int64_t)v; }},
      {"op_us", [&](double v) { c.op_us = v; }},
      {"flops_per_us", [&](double v) { c.flops_per_us = v; }},
      {"bytes_per_us", [&](double v) { c.bytes_per_us = v; }},
      {"copy_bytes_per_us", [&](double v) { c.copy_bytes_per_us = v; }},
      {"link_bytes_per_us", [&](double v) { c.link_bytes_per_us = v; }},
      {"link_latency_us", [&](double v) { c.link_latency_us = v; }},
      {"p2p_pair_comm", [&](double v) { c.p2p_pair_comm = v; }},
      {"lost_hangs", [&](double v) { c.lost_hangs = v; }},
      {"first_use", [&](double v) { c.first_use = v; }},
      {"memory_waits", [&](double v) { c.memory_waits = v; }},
      {"one_pool", [&](double v) { c.one_pool = v; }},
      {"touches", [&](double v) { c.touches = v; }},
      {"queues", [&](double v) { c.queues = (int)v; }},
      {"eager_bytes", [&](double v) { c.eager_bytes = (int64_t)v; }},
  };
  auto i = known.find(name);
  TORCH_CHECK(i != known.end(), "emu: no setting ", name);
  i->second(v);
}

static void set_cost(const std::string& name, double us) {
  std::lock_guard<std::mutex> l(cfg().m);
  if (us < 0)
    cfg().cost.erase(name);
  else
    cfg().cost[name] = us;
}

static std::map<std::string, int64_t> copy_of(const std::map<std::string, int64_t>& table) {
  std::lock_guard<std::mutex> l(cfg().m);
  return table;
}

static void start(int num_devices) {
  cfg().ndev = num_devices;
  c10::SetAllocator(kEmu, Alloc::get());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  pthread_atfork(nullptr, nullptr, [] { bad_fork = used; });
}

static void stall(double us) {
  int d = cur_dev();
  stream(d, cur_stream(d)).push([us] { std::this_thread::sleep_for(std::chrono::nanoseconds((int64_t)(us * 1e3))); });
}
}  // namespace emu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace emu;
  m.def("start", &start);
  m.def("touch", &touch);
  m.def("in_bad_fork", [] { return bad_fork; });
  m.def("device_count", [] { return cfg().ndev; });
  m.def("current_device", &cur_dev);
  m.def("set_delay", [](int d, int64_t sid, int64_t us) { stream(d, sid).delay_us = us; });
  m.def("sleep", &stall);
  m.def("set", &set);
  m.def("set_cost", &set_cost);
  m.def("charged_ns", [] { return cfg().charged_ns.load(); });
  m.def("syncs", [] { return copy_of(cfg().syncs); });
  m.def("sync_fallbacks", [] { return copy_of(cfg().sync_fallbacks); });
  m.def("reset_counts", [] {
    std::lock_guard<std::mutex> l(cfg().m);
    cfg().syncs.clear();
    cfg().sync_fallbacks.clear();
  });
  m.def("rng", [](int d) { return std::make_pair(default_gen(d).get<Gen>()->s, default_gen(d).get<Gen>()->off); });
  m.def("set_rng", [](int d, uint64_t s, uint64_t o) {
    default_gen(d).get<Gen>()->s = s;
    default_gen(d).get<Gen>()->off = o;
  });
  m.def("quiesce", [] {
    if (!bad_fork) each_stream([](StreamImpl& s) { s.drain(); });
  });
  bind_nccl(m);
}
