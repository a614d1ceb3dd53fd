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

// What the threads of one parallel call share: their barrier, and the work that is handed out.
class Team {
public:
    explicit Team(int size) : size_(size) {}
    int size() const { return size_; }

    // All threads arrive before any goes on; work is handed out anew from 0.
    void barrier();

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

// Held by a caller of run_team while it uses the scratch memory that calls share.
std::mutex& call_mutex();

}  // namespace folio
