// A pool that runs one function on all its threads, the caller among them.
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
