// A few threads that run one function together, and meet at barriers inside it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace folio {

// Memory that a thread will read, asked for while it has nothing else to do. Two stretches, in turn.
class Lines {
public:
    void add(const uint8_t* data, int64_t bytes) {
        if (count_ < 2) at_[count_] = data, end_[count_++] = data + bytes;
    }
    bool left() const { return at_[0] < end_[0] || at_[1] < end_[1]; }
    void fetch(int lines = 1) {
        for (; lines > 0; lines--)
            for (int i = 0; i < 2; i++)
                if (at_[i] < end_[i]) __builtin_prefetch(at_[i]), at_[i] += 64;
    }

private:
    const uint8_t *at_[2] = {}, *end_[2] = {};
    int count_ = 0;
};

// What the threads of one parallel call share: their barrier, and the work that is handed out.
class Team {
public:
    explicit Team(int size) : size_(size) {}
    int size() const { return size_; }

    // All threads arrive before any goes on; work is handed out anew from 0. Who waits fetches `coming`.
    void barrier(Lines* coming = nullptr);

    // The next `chunk` units of `total`: their first in `begin`, one past their last in `end`; false when none is left, or
    // at most `left` are.
    bool take(int64_t total, int64_t chunk, int64_t& begin, int64_t& end, int64_t left = 0) {
        if (left && total - next_.load(std::memory_order_relaxed) <= left) return false;
        begin = next_.fetch_add(chunk, std::memory_order_relaxed);
        if (begin >= total) return false;
        end = begin + chunk < total ? begin + chunk : total;
        return true;
    }

private:
    const int size_;
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
};

// Runs `work(team, thread)` on `threads` threads, the caller's among them. One call at a time; others wait.
void run_team(int threads, const std::function<void(Team&, int)>& work);

// Until `value` differs from `old`: on the core at first, then offering it to others, then asleep.
void wait_for_change(const std::atomic<uint32_t>& value, uint32_t old);

// Held by a caller of run_team while it uses the scratch memory that calls share.
std::mutex& call_mutex();

}  // namespace folio
