// A pool that runs one function on all its threads, the caller among them.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

// Lets all threads of a run meet; they spin, since the wait is a few microseconds,
// and give way only when a thread seems to have lost its core.
class Barrier {
  public:
    void reset(int num_threads);
    // The last thread to come calls work() before all go on.
    template <class Work>
    void wait(Work work) {
        const uint32_t phase = phase_.load(std::memory_order_acquire);
        if (waiting_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
            waiting_.store(0, std::memory_order_relaxed);
            work();
            phase_.store(phase + 1, std::memory_order_release);
        } else {
            wait_for_next(phase);
        }
    }

  private:
    void wait_for_next(uint32_t phase) const;

    std::atomic<uint32_t> phase_{0};
    std::atomic<int32_t> waiting_{0};
    int32_t num_threads_ = 1;
};

class ThreadPool {
  public:
    ~ThreadPool() { resize(1); }
    void resize(int num_threads);
    int size() const { return 1 + int(workers_.size()); }
    // Calls work(thread number) on every thread and returns when all are done.
    void run(const std::function<void(int)>& work);

  private:
    void worker(int number, uint32_t seen);

    std::vector<std::thread> workers_;
    const std::function<void(int)>* work_ = nullptr;
    std::atomic<uint32_t> generation_{0};
    std::atomic<int32_t> unfinished_{0};
    std::atomic<bool> stop_{false};
};
