// The device's caching allocator. A freed block goes back to the pool of its own stream at once, as on CUDA, and the
// block freed last is handed out first: whoever still reads it on another stream without record_stream reads garbage.
#include "emulated.h"
namespace emu {
struct Block {
  char* p;
  size_t size, req;
  int dev;
  int64_t sid;
  std::set<int64_t> used;
};
struct Alloc final : c10::DeviceAllocator {
  std::mutex m;
  std::map<std::pair<int, int64_t>, std::multimap<size_t, Block*>> pool;
  std::unordered_map<void*, Block*> live;
  struct Late {
    Block* b;
    std::vector<std::pair<EventPtr, uint64_t>> ev;
  };
  std::deque<Late> late;  // freed, but other streams have recorded use
  std::map<int, c10::CachingDeviceAllocator::DeviceStats> st;
  static size_t rounded(size_t n) { return (n + 511) / 512 * 512; }
  static Alloc* get() {
    static auto* a = new Alloc;
    return a;
  }
  void give_back(Block* b) {  // stream-ordered: what is queued on the block's own stream still sees its data
    if (cfg().poison == 2) {
      auto* p = b->p;
      auto n = b->size;
      stream(b->dev, b->sid).push([p, n] { memset(p, 0xff, n); });
    }
    b->used.clear();
    pool[{b->dev, b->sid}].emplace(b->size, b);
  }
  void poll() {
    for (size_t i = 0; i < late.size();) {
      bool ok = true;
      for (auto& [e, v] : late[i].ev) {
        std::lock_guard<std::mutex> l(e->m);
        ok = ok && e->done >= v;
      }
      if (ok) {
        give_back(late[i].b);
        late.erase(late.begin() + i);
      } else
        i++;
    }
  }
  c10::DataPtr allocate(size_t n) override {
    int d = cur_dev();
    c10::Device device(kEmu, d);
    if (!n) return {nullptr, nullptr, &del, device};
    size_t sz = rounded(n);
    int64_t sid = cur_stream(d);
    Force f;
    std::unique_lock<std::mutex> l(m);
    poll();
    auto& s = st[d];
    Block* b = nullptr;
    auto& pl = pool[{d, sid}];
    auto it = pl.lower_bound(sz);
    if (it != pl.end())
      it = std::prev(pl.upper_bound(it->first));  // the block freed last: the worst case for who still reads it
    if (it != pl.end() && it->first <= 2 * sz) {
      b = it->second;
      pl.erase(it);
      if (cfg().poison == 1) {
        auto* p = b->p;
        auto k = b->size;
        stream(d, sid).push([p, k] { memset(p, 0xff, k); });
      }
    } else {
      if (s.reserved_bytes[0].current + (int64_t)sz > cfg().capacity) {
        wait_and_empty(l, d);
      } else if (cfg().memory_waits) {
        l.unlock();
        drain_device(d);
        l.lock();
      }
      if (s.reserved_bytes[0].current + (int64_t)sz > cfg().capacity) {
        s.num_ooms++;
        TORCH_CHECK_WITH(OutOfMemoryError, false, "emu out of memory. Tried to allocate ", n, " bytes on emu:", d,
                         " (capacity ", cfg().capacity.load(), ", reserved ", s.reserved_bytes[0].current, ")");
      }
      void* p = nullptr;
      TORCH_CHECK(!posix_memalign(&p, 64, sz), "emu: host malloc failed");
      memset(p, 0xff, sz);
      b = new Block{(char*)p, sz, n, d, sid, {}};
      s.reserved_bytes[0].increase(sz);
      s.segment[0].increase(1);
      s.num_device_alloc++;
    }
    b->req = n;
    live[b->p] = b;
    s.allocation[0].increase(1);
    s.allocated_bytes[0].increase(sz);  // CUDA splits a larger block: what is left of it is not given out
    s.active_bytes[0].increase(sz);
    s.requested_bytes[0].increase(n);
    return {b->p, b->p, &del, device};
  }
  static void del(void* p) {
    if (p) get()->free(p);
  }
  void free(void* p) {
    Force f;
    std::lock_guard<std::mutex> l(m);
    auto it = live.find(p);
    if (it == live.end() || bad_fork) return;
    Block* b = it->second;
    live.erase(it);
    auto& s = st[b->dev];
    s.allocation[0].decrease(1);
    s.allocated_bytes[0].decrease(rounded(b->req));
    s.active_bytes[0].decrease(rounded(b->req));
    s.requested_bytes[0].decrease(b->req);
    if (b->used.empty()) return give_back(b);
    Late x{b, {}};
    for (auto sid : b->used) {
      auto e = std::make_shared<Event>();
      x.ev.emplace_back(e, record_event(e, b->dev, sid));
    }
    late.push_back(std::move(x));
  }
  void recordStream(const c10::DataPtr& p, c10::Stream s) override {
    std::lock_guard<std::mutex> l(m);
    auto it = live.find(p.get_context());
    if (it != live.end() && it->second->sid != s.id()) it->second->used.insert(s.id());
  }
  // As cudaFree, which waits. Not with the lock in hand: what is waited for may free memory.
  void wait_and_empty(std::unique_lock<std::mutex>& l, int d) {
    std::set<int64_t> streams;
    for (auto& [k, pl] : pool)
      if (k.first == d && !pl.empty()) streams.insert(k.second);
    l.unlock();
    for (auto sid : streams) stream(d, sid).drain();
    if (cfg().memory_waits) drain_device(d);
    l.lock();
    poll();
    empty_locked(d);
  }
  void empty_locked(int d) {
    for (auto& [k, pl] : pool)
      if (k.first == d) {
        for (auto& [sz, b] : pl) {
          st[d].reserved_bytes[0].decrease(sz);
          st[d].segment[0].decrease(1);
          st[d].num_device_free++;
          ::free(b->p);
          delete b;
        }
        pl.clear();
      }
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    std::unique_lock<std::mutex> l(m);
    for (int d = 0; d < cfg().ndev; d++) wait_and_empty(l, d);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex d) override {
    std::lock_guard<std::mutex> l(m);
    return st[d];
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex d) override {
    std::lock_guard<std::mutex> l(m);
    auto& s = st[d];
    for (auto* a : {&s.allocation, &s.allocated_bytes, &s.active_bytes, &s.reserved_bytes, &s.requested_bytes})
      (*a)[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex d) override {
    std::lock_guard<std::mutex> l(m);
    size_t c = cfg().capacity;
    return {c - st[d].reserved_bytes[0].current, c};
  }
  void copy_data(void* a, const void* b, size_t n) const override { default_copy_data(a, b, n); }
};
}  // namespace emu
