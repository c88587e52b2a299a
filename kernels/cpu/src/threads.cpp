#include "threads.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

void pause_briefly() {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void ThreadPool::resize(int num_threads) {
    if (num_threads < 1) num_threads = 1;
    if (num_threads == size()) return;
    stop_.store(true);
    generation_.fetch_add(1);
    generation_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    stop_.store(false);
    const uint32_t seen = generation_.load();
    for (int i = 1; i < num_threads; i++) workers_.emplace_back([this, i, seen] { worker(i, seen); });
}

void ThreadPool::run(const std::function<void(int)>& work) {
    work_ = &work;
    unfinished_.store(int32_t(workers_.size()), std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    work(0);
    spin_until([&] { return unfinished_.load(std::memory_order_acquire) == 0; });
}

void ThreadPool::worker(int number, uint32_t seen) {
    for (;;) {
        for (int i = 0; i < SPINS && generation_.load(std::memory_order_acquire) == seen; i++) pause_briefly();
        generation_.wait(seen, std::memory_order_acquire);
        seen = generation_.load(std::memory_order_acquire);
        if (stop_.load(std::memory_order_acquire)) return;
        (*work_)(number);
        unfinished_.fetch_sub(1, std::memory_order_acq_rel);
    }
}
