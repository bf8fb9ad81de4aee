// Allocations that fail when a test says so: the program's operator new.
#pragma once

#include <atomic>
#include <cstdlib>
#include <new>

inline std::atomic<int> allocations_left{-1};  // until one fails; below 0 = none does

inline void* allocate(std::size_t bytes) {
    int left = allocations_left.load();
    while (left >= 0 && !allocations_left.compare_exchange_weak(left, left - 1)) {}
    if (left == 0) throw std::bad_alloc();
    if (void* at = std::malloc(bytes ? bytes : 1)) return at;
    throw std::bad_alloc();
}

void* operator new(std::size_t bytes) { return allocate(bytes); }
void* operator new[](std::size_t bytes) { return allocate(bytes); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return std::malloc(bytes ? bytes : 1); }
void operator delete(void* at) noexcept { std::free(at); }
void operator delete[](void* at) noexcept { std::free(at); }
void operator delete(void* at, std::size_t) noexcept { std::free(at); }
void operator delete[](void* at, std::size_t) noexcept { std::free(at); }
