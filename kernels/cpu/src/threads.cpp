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
    for (int i = 1; i < num_threads; i++) workers_.emplace_back([this, seen] { worker(seen); });
}

void ThreadPool::run(Job& job) {
    job.begin();
    job_.store(&job, std::memory_order_release);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    job.work_();
    job.end();
}

void ThreadPool::run_to_the_end(Job& job, std::function<void()> work) {
    job.work_ = std::move(work);
    run(job);
    job.settle();
}

void ThreadPool::worker(uint32_t seen) {
    for (;;) {
        for (int i = 0; i < SPINS && generation_.load(std::memory_order_acquire) == seen; i++) pause_briefly();
        generation_.wait(seen, std::memory_order_acquire);
        seen = generation_.load(std::memory_order_acquire);
        if (stop_.load(std::memory_order_acquire)) return;
        Job* job = job_.load(std::memory_order_acquire);
        if (!job->enter()) continue;
        job->work_();
        job->leave();
    }
}
