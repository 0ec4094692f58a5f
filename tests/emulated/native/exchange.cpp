// Bytes between ranks, over sockets: matched by order per pair and communicator, without tags, by rendezvous. A sender
// is done when its receiver says so; what comes in another order than expected is named on both sides.
#include "emulated.h"
namespace emu {
static int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

// One frame: header and payload from sender to receiver, one byte back.
struct Head {
  uint64_t magic;
  char kind[24];
  uint64_t seq, bytes;
  int64_t arrives_ns;
};
struct Op {
  bool send;
  int peer;
  char* p;
  size_t n;
};
struct Chan {
  int fd = -1;
  uint64_t seq = 0;
  int64_t link_free = 0;
};
struct Comm {
  std::string key;
  int dev;
  int64_t sid;
  std::map<int, Chan> tx, rx;
  ~Comm() {  // whoever holds it has no transfer under way
    for (auto* side : {&tx, &rx})
      for (auto& [peer, ch] : *side)
        if (ch.fd >= 0) close(ch.fd);
    free_comm_stream(dev, sid);
  }
};

static bool gone(ssize_t r) { return r == 0 || (r < 0 && (errno == EPIPE || errno == ECONNRESET)); }
static size_t moved(ssize_t r, const char* what) {
  if (gone(r) && cfg().lost_hangs) return 0;
  TORCH_CHECK(r > 0 || (r < 0 && (errno == EAGAIN || errno == EINTR)), "fakenccl: peer gone (", what, ")");
  return r > 0 ? (size_t)r : 0;
}

// Some transfers that progress together, in order per pair and direction. Runs on the communicator's stream.
struct Exchange {
  struct Transfer {
    const Op* op;
    Head head{};
    size_t done = 0;
    size_t size() const { return sizeof(Head) + op->n; }
    char* at() { return done < sizeof(Head) ? (char*)&head + done : op->p + (done - sizeof(Head)); }
    size_t room() const { return done < sizeof(Head) ? sizeof(Head) - done : size() - done; }
  };
  Comm& comm;
  const char* kind;
  int rank;
  std::map<int, std::deque<Transfer>> out, in;
  size_t left = 0;
  std::vector<pollfd> watched;
  int64_t nap = 0;

  Exchange(Comm& comm, const char* kind, int rank, const std::vector<Op>& ops) : comm(comm), kind(kind), rank(rank) {
    for (auto& op : ops)
      if (op.peer != rank) {
        (op.send ? out : in)[op.peer].push_back(Transfer{&op});
        left++;
      } else if (op.send) {
        for (auto& other : ops)
          if (!other.send && other.peer == rank) {
            memcpy(other.p, op.p, op.n);
            break;
          }
      }
  }

  void finished(std::deque<Transfer>& queue) {
    queue.pop_front();
    left--;
    nap = 0;
  }

  void address(Transfer& t, Chan& ch) {
    t.head.magic = 0xe00e;
    strncpy(t.head.kind, kind, sizeof(t.head.kind) - 1);
    t.head.seq = ch.seq++;
    t.head.bytes = t.op->n;
    int64_t at = std::max(now_ns(), ch.link_free);
    if (cfg().link_bytes_per_us > 0) at += (int64_t)(t.op->n / cfg().link_bytes_per_us * 1e3);
    ch.link_free = at;
    t.head.arrives_ns = at + (int64_t)(cfg().link_latency_us * 1e3);
  }

  void push(std::deque<Transfer>& queue, Chan& ch) {
    auto& t = queue.front();
    if (!t.head.magic) address(t, ch);
    while (t.done < t.size()) {
      size_t r = moved(::send(ch.fd, t.at(), t.room(), MSG_NOSIGNAL), "send");
      if (!r) return watched.push_back({ch.fd, POLLOUT, 0});
      t.done += r;
    }
    char ok;
    bool eager = t.op->n <= (size_t)cfg().eager_bytes;
    if (eager || moved(::recv(ch.fd, &ok, 1, 0), "acknowledgement")) return finished(queue);
    watched.push_back({ch.fd, POLLIN, 0});
  }

  void pull(std::deque<Transfer>& queue, Chan& ch, int peer) {
    auto& t = queue.front();
    while (t.done < t.size()) {
      size_t r = moved(::recv(ch.fd, t.at(), t.room(), 0), "receive");
      if (!r) return watched.push_back({ch.fd, POLLIN, 0});
      t.done += r;
      if (t.done == sizeof(Head))
        TORCH_CHECK(!strcmp(t.head.kind, kind) && t.head.bytes == t.op->n && t.head.seq == ch.seq,
                    "fakenccl: order mismatch on communicator ", comm.key, ": rank ", rank, " expects ", kind, " #",
                    ch.seq, " of ", t.op->n, " bytes from rank ", peer, ", which sent ", t.head.kind, " #", t.head.seq,
                    " of ", t.head.bytes, " bytes");
    }
    int64_t wait = t.head.arrives_ns - now_ns();
    if (wait > 0) {
      nap = std::min(nap, wait);
      return;
    }
    ch.seq++;
    if (t.op->n > (size_t)cfg().eager_bytes) moved(::send(ch.fd, "k", 1, MSG_NOSIGNAL), "acknowledgement");
    finished(queue);
  }

  void run(const std::atomic<bool>& dead, int64_t limit_ms) {
    auto end = Clock::now() + std::chrono::milliseconds(limit_ms);
    while (left) {
      watched.clear();
      nap = 100000000;
      for (auto& [peer, queue] : out)
        if (!queue.empty()) push(queue, comm.tx[peer]);
      for (auto& [peer, queue] : in)
        if (!queue.empty()) pull(queue, comm.rx[peer], peer);
      if (!left) break;
      TORCH_CHECK(!dead, "fakenccl: communicator ", comm.key, " aborted");
      TORCH_CHECK(Clock::now() < end, "fakenccl: rank ", rank, " timed out after ", limit_ms, " ms in ", kind,
                  " on communicator ", comm.key, ": ", left, " transfers unmatched");
      if (nap) {
        timespec ts{nap / 1000000000, nap % 1000000000};
        int ready = ppoll(watched.data(), watched.size(), &ts, nullptr);
        for (auto& each : watched)
          if (ready > 0 && cfg().lost_hangs && (each.revents & (POLLHUP | POLLERR))) usleep(1000);
      }
    }
  }
};
}  // namespace emu
