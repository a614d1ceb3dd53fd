#include "pool.h"

#include <sched.h>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace folio {
namespace {

// Turns of a waiting loop: some ten microseconds on the core, then a few offers of it to others, then sleep. Whoever
// waits longer shares the core with the one it waits for: the HTTP process, or a thread of this very team.
constexpr int SPINS = 600;
constexpr int YIELDS = 40;
// Between two calls the engine plans, for about half a millisecond; a worker that slept through it would be late by a
// wake-up. It offers its core to others all the while.
constexpr int IDLE_SPINS = 600;
constexpr int IDLE_YIELDS = 2000;

inline void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void wait_in_turns(const std::atomic<uint32_t>& value, uint32_t old, int spins, int yields) {
    for (int i = 0; i < spins; i++) {
        if (value.load(std::memory_order_acquire) != old) return;
        pause_core();
    }
    for (int i = 0; i < yields; i++) {
        if (value.load(std::memory_order_acquire) != old) return;
        sched_yield();
    }
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

// A core for each thread of a call, where there are as many as cores: the caller keeps the one it is on. Two threads on one
// core, while something else runs on the other for a moment, wait for each other at every barrier; the system takes a
// while to see that.
class Cores {
public:
    // Chooses them; the caller stays on its own until `leave`.
    void take(int threads) {
        of_thread_.clear();
#if defined(__linux__)
        int here = sched_getcpu();
        if (sched_getaffinity(0, sizeof allowed_, &allowed_) || CPU_COUNT(&allowed_) != threads || here < 0) return;
        of_thread_.push_back(here);
        for (int core = 0; core < CPU_SETSIZE; core++)
            if (core != here && CPU_ISSET(core, &allowed_)) of_thread_.push_back(core);
        if (int(of_thread_.size()) != threads) return of_thread_.clear();  // it was moved meanwhile
        stay(here);
#endif
    }
    void leave() {
        if (!of_thread_.empty()) stay(ANY);
    }

    static constexpr int ANY = -1;
    int of(int thread) const { return of_thread_.empty() ? ANY : of_thread_[size_t(thread)]; }

    // The calling thread stays on a core from now on, or goes wherever the process may.
    void stay([[maybe_unused]] int core) const {
#if defined(__linux__)
        cpu_set_t one;
        CPU_ZERO(&one);
        if (core != ANY) CPU_SET(core, &one);
        sched_setaffinity(0, sizeof one, core == ANY ? &allowed_ : &one);
#endif
    }

private:
    std::vector<int> of_thread_;
#if defined(__linux__)
    cpu_set_t allowed_;
#endif
};

class Pool {
public:
    ~Pool() { resize(0); }

    void run(int threads, const std::function<void(Team&, int)>& work) {
        if (threads <= 1) {
            Team alone(1);
            work(alone, 0);
            return;
        }
        if (int(workers_.size()) != threads - 1) resize(threads - 1);
        Team team(threads);
        cores_.take(threads);
        team_ = &team;
        work_ = &work;
        left_.store(uint32_t(threads - 1), std::memory_order_relaxed);
        epoch_.fetch_add(1, std::memory_order_release);
        epoch_.notify_all();
        work(team, 0);
        for (uint32_t left; (left = left_.load(std::memory_order_acquire)) != 0;) wait_for_change(left_, left);
        cores_.leave();
    }

private:
    void resize(int count) {
        stopping_.store(true, std::memory_order_relaxed);
        epoch_.fetch_add(1, std::memory_order_release);
        epoch_.notify_all();
        for (auto& worker : workers_) worker.join();
        workers_.clear();
        stopping_.store(false, std::memory_order_relaxed);
        uint32_t seen = epoch_.load(std::memory_order_acquire);
        for (int i = 0; i < count; i++) workers_.emplace_back([this, i, seen] { serve(i + 1, seen); });
    }

    void serve(int thread, uint32_t seen) {
        for (int core = Cores::ANY;;) {
            wait_in_turns(epoch_, seen, IDLE_SPINS, IDLE_YIELDS);
            seen = epoch_.load(std::memory_order_acquire);
            if (stopping_.load(std::memory_order_relaxed)) return;
            if (cores_.of(thread) != core) cores_.stay(core = cores_.of(thread));
            (*work_)(*team_, thread);
            if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) left_.notify_all();
        }
    }

    std::vector<std::thread> workers_;
    Cores cores_;
    Team* team_ = nullptr;
    const std::function<void(Team&, int)>* work_ = nullptr;
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<uint32_t> left_{0};
};

Pool& pool() {
    static Pool* the_pool = new Pool;  // never destroyed: its threads may outlive static destructors
    return *the_pool;
}

}  // namespace

void Team::barrier(Lines* coming) {
    if (size_ == 1) {
        next_.store(0, std::memory_order_relaxed);
        return;
    }
    uint32_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
        arrived_.store(0, std::memory_order_relaxed);
        next_.store(0, std::memory_order_relaxed);
        round_.fetch_add(1, std::memory_order_release);
        round_.notify_all();
        return;
    }
    while (coming && coming->left() && round_.load(std::memory_order_acquire) == round) coming->fetch();
    wait_for_change(round_, round);
}

void run_team(int threads, const std::function<void(Team&, int)>& work) { pool().run(threads, work); }

void wait_for_change(const std::atomic<uint32_t>& value, uint32_t old) { wait_in_turns(value, old, SPINS, YIELDS); }

std::mutex& call_mutex() {
    static std::mutex the_mutex;
    return the_mutex;
}

}  // namespace folio
