// A pool that runs one job on all its threads, the caller among them.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

// About 50 microseconds: longer than any gap within a step, shorter than a frame, so
// an idle pool costs nothing and a busy one is not woken by the kernel.
constexpr int SPINS = 4000;

void pause_briefly();

// Waits for something that takes a few microseconds: spins, and gives way only when it takes so long that a thread
// seems to have lost its core.
template <class Condition>
void spin_until(Condition done) {
    for (int i = 0; !done(); i++) {
        if (i < SPINS)
            pause_briefly();
        else
            std::this_thread::yield();
    }
}

// What the threads of a pool do together. A job outlives the pool: threads that come when it is over look at it, and
// turn back. Those that are in it then are not waited for, except by `settle`.
class Job {
  public:
    explicit Job(std::function<void()> work = {}) : work_(std::move(work)) {}
    // Waits for threads that are still leaving. What the work reads may be changed between this and the next run.
    void settle() const {
        spin_until([&] { return (presence_.load(std::memory_order_acquire) & ~OVER) == 0; });
    }

  private:
    friend class ThreadPool;
    static constexpr uint32_t OVER = uint32_t(1) << 31;

    bool enter() {
        if (!(presence_.fetch_add(1, std::memory_order_acq_rel) & OVER)) return true;
        leave();
        return false;
    }
    void leave() { presence_.fetch_sub(1, std::memory_order_acq_rel); }
    void begin() { presence_.fetch_and(~OVER, std::memory_order_acq_rel); }
    void end() { presence_.fetch_or(OVER, std::memory_order_acq_rel); }

    std::function<void()> work_;
    std::atomic<uint32_t> presence_{OVER};  // the number of threads in it
};

// Its threads are bound to no core: where two pools meet, or cores are not alike, the system places them better.
class ThreadPool {
  public:
    ~ThreadPool() { resize(1); }
    void resize(int num_threads);
    int size() const { return 1 + int(workers_.size()); }
    // Calls the job's work on this thread, and on each that comes before it returns here. A settled job only.
    void run(Job& job);
    // The same for other work, after which no thread is in it.
    void run_to_the_end(Job& job, std::function<void()> work);

  private:
    void worker(uint32_t seen);

    std::vector<std::thread> workers_;
    std::atomic<Job*> job_{nullptr};
    std::atomic<uint32_t> generation_{0};
    std::atomic<bool> stop_{false};
};
