#include "runtime/memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "layout.hpp"

namespace kvl {

HugeBuffer::HugeBuffer(int64_t bytes) : bytes_(round_up(std::max<int64_t>(bytes, 1), kHugePage)) {
    void* mapped = mmap(nullptr, size_t(bytes_ + kHugePage), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    auto* start = static_cast<uint8_t*>(mapped);
    at_ = start + (kHugePage - int64_t(reinterpret_cast<uintptr_t>(start) % kHugePage)) % kHugePage;
    if (at_ > start) munmap(start, size_t(at_ - start));
    if (start + kHugePage > at_) munmap(at_ + bytes_, size_t(start + kHugePage - at_));
#if defined(MADV_HUGEPAGE)
    madvise(at_, size_t(bytes_), MADV_HUGEPAGE);
#endif
}

HugeBuffer::~HugeBuffer() {
    if (at_ != nullptr) munmap(at_, size_t(bytes_));
}

}  // namespace kvl
