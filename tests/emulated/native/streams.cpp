// Streams are threads with a queue: what is enqueued runs later, so a forgotten wait computes with what is not there
// yet. Lazy streams run only what somebody waits for; delays make the order of two streams random.
#include "emulated.h"
namespace emu {
Config& cfg() {
  static auto* c = new Config;
  return *c;
}
static bool bad_fork = false;  // as CUDA: only a process that has used a device must not fork
static std::atomic<bool> used{false};
struct Device {
  StreamImpl s[kStreams];
  std::atomic<int> next{0}, next_comm{0};
  HardwareQueue hardware[kStreams];
  std::mutex m, compute;
  std::exception_ptr err;
  std::vector<int64_t> free_comms;
};
static Device& dev(int d) {
  used = true;
  static auto* v = [] {
    auto* v = new std::deque<Device>(cfg().ndev);
    for (int d = 0; d < cfg().ndev; d++)
      for (int i = 0; i < kStreams; i++) {
        (*v)[d].s[i].dev = d;
        (*v)[d].s[i].id = i;
      }
    return v;
  }();
  TORCH_CHECK(!bad_fork, "Cannot re-initialize emu in a forked subprocess: use the 'spawn' start method");
  TORCH_CHECK(d >= 0 && d < (int)v->size(), "emu: invalid device ordinal ", d);
  return (*v)[d];
}
StreamImpl& stream(int d, int64_t id) {
  TORCH_CHECK(id >= 0 && id < kStreams, "emu: no stream ", id);
  return dev(d).s[id];
}
static thread_local int tl_dev = 0;
static thread_local std::map<int, int64_t> tl_stream;
int cur_dev() { return tl_dev; }
void set_dev(int d) {
  dev(d);
  tl_dev = d;
}
int64_t cur_stream(int d) {
  auto i = tl_stream.find(d);
  return i == tl_stream.end() ? 0 : i->second;
}
void set_stream(int d, int64_t id) {
  stream(d, id);
  tl_stream[d] = id;
}
int64_t new_stream(int d) { return 1 + dev(d).next++ % kPool; }
void free_comm_stream(int d, int64_t id) {
  if (id <= kPool) return;
  std::lock_guard<std::mutex> l(dev(d).m);
  dev(d).free_comms.push_back(id);
}
int64_t new_comm_stream(int d) {
  if (cfg().one_pool) return new_stream(d);
  {
    std::lock_guard<std::mutex> l(dev(d).m);
    auto& left = dev(d).free_comms;
    if (!left.empty()) {
      auto id = left.back();
      left.pop_back();
      return id;
    }
  }
  int n = dev(d).next_comm++;
  TORCH_CHECK(n < kComms, "emu: more than ", kComms, " communicators on one device");
  return 1 + kPool + n;
}
void set_error(int d, std::exception_ptr e) {
  std::lock_guard<std::mutex> l(dev(d).m);
  if (!dev(d).err) dev(d).err = e;
}
void raise_error(int d) {
  std::exception_ptr e;
  {
    std::lock_guard<std::mutex> l(dev(d).m);
    std::swap(e, dev(d).err);
  }
  if (e) std::rethrow_exception(e);
}
void count(std::map<std::string, int64_t>& table, const std::string& what) {
  std::lock_guard<std::mutex> l(cfg().m);
  table[what]++;
}
void host_sync(const char* why) {
  count(cfg().syncs, why);
  if (cfg().sync_mode == 1) TORCH_WARN("emu: called a synchronizing operation: ", why);
  TORCH_CHECK(cfg().sync_mode != 2, "emu: called a synchronizing operation: ", why);
}
// A full launch queue blocks the host, but never a worker or somebody who holds the allocator's lock; and nobody
// waits for the GIL with a stream's lock in hand.
static thread_local int tl_force = 0;
struct Force {
  Force() { tl_force++; }
  ~Force() { tl_force--; }
};
void HardwareQueue::until(uint64_t ticket) {
  std::unique_lock<std::mutex> l(m);
  cv.wait(l, [&] { return left == ticket; });
}
void HardwareQueue::leave() {
  {
    std::lock_guard<std::mutex> l(m);
    left++;
  }
  cv.notify_all();
}
void touch() {
  if (cfg().touches) used = true;
}
void drain_device(int d) {
  for (auto& s : emu::dev(d).s) s.drain();
}
uint64_t StreamImpl::push(Task t, bool waits) {
  TORCH_CHECK(!bad_fork, "Cannot use emu in a forked subprocess");
  for (;;) {
    {
      std::unique_lock<std::mutex> l(m);
      if (!started) {
        started = true;
        std::thread([this] { loop(); }).detach();
      }
      if (tl_force || !cfg().queue_limit || (int)q.size() <= cfg().queue_limit) {
        int n = cfg().lazy ? 0 : cfg().queues;
        auto* h = n ? &emu::dev(dev).hardware[id % n] : nullptr;
        uint64_t ticket = 0;
        if (h) {
          std::lock_guard<std::mutex> k(h->m);
          ticket = h->next++;
        }
        q.push_back({std::move(t), waits, h, ticket});
        enq++;
        cv.notify_one();
        return enq;
      }
      want = enq;
      cv.notify_one();
    }
    NoGil g;
    std::unique_lock<std::mutex> l(m);
    idle.wait(l, [&] { return (int)q.size() <= cfg().queue_limit; });
  }
}
void StreamImpl::nudge() {
  std::lock_guard<std::mutex> l(m);
  cv.notify_one();
}
void StreamImpl::demand(uint64_t i) {
  std::lock_guard<std::mutex> l(m);
  if (i > want) {
    want = i;
    cv.notify_one();
  }
}
void Event::wait(uint64_t v) {
  std::unique_lock<std::mutex> l(m);
  auto* s = src;
  auto i = idx;
  if (done < v && s) {
    l.unlock();
    s->demand(i);
    l.lock();
  }
  cv.wait(l, [&] { return done >= v; });
}
bool Event::query() {
  std::unique_lock<std::mutex> l(m);
  if (done >= recorded) return true;
  auto* s = src;
  auto i = idx;
  l.unlock();
  if (s) s->demand(i);
  return false;
}
void StreamImpl::loop() {
  Force f;
  at::set_num_threads(1);
  uint64_t rng = cfg().seed * 1000003 + dev * 131 + id;
  at::AutoDispatchBelowADInplaceOrView guard;
  for (;;) {
    Queued t;
    {
      std::unique_lock<std::mutex> l(m);
      cv.wait(l, [&] { return !q.empty() && (eager || !cfg().lazy || fin < want); });
      t = std::move(q.front());
      q.pop_front();
    }
    if (auto j = cfg().jitter_us.load()) {
      rng = rng * 6364136223846793005ull + 1442695040888963407ull;
      std::this_thread::sleep_for(std::chrono::microseconds((rng >> 33) % j));
    }
    if (auto d = delay_us.load()) std::this_thread::sleep_for(std::chrono::microseconds(d));
    if (t.hardware) t.hardware->until(t.ticket);
    if (t.hardware && !t.waits) t.hardware->leave();
    try {
      t.run();
    } catch (...) {
      set_error(dev, std::current_exception());
    }
    if (t.hardware && t.waits) t.hardware->leave();
    t.run = nullptr;  // drops what the task held before it counts as done
    {
      std::lock_guard<std::mutex> l(m);
      fin++;
    }
    idle.notify_all();
  }
}
void StreamImpl::drain() {
  NoGil g;
  std::unique_lock<std::mutex> l(m);
  auto n = enq;
  want = std::max(want, n);
  cv.notify_one();
  idle.wait(l, [&] { return fin >= n; });
}
uint64_t record_event(const EventPtr& e, int d, int64_t sid) {
  uint64_t v;
  {
    std::lock_guard<std::mutex> l(e->m);
    v = ++e->recorded;
  }
  auto& s = stream(d, sid);
  auto i = s.push([e, v] {
    {
      std::lock_guard<std::mutex> l(e->m);
      e->done = std::max(e->done, v);
      e->at = Clock::now();
    }
    e->cv.notify_all();
  });
  {
    std::lock_guard<std::mutex> l(e->m);
    e->src = &s;
    e->idx = i;
  }
  return v;
}
void stream_wait(const EventPtr& e, uint64_t v, int d, int64_t sid) {
  stream(d, sid).push([e, v] { e->wait(v); }, true);
}
}  // namespace emu
