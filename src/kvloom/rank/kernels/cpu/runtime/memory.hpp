// Large buffers in huge pages.
#pragma once

#include <cstdint>
#include <new>
#include <utility>

namespace kvl {

constexpr int64_t kHugePage = 2 << 20;

// Anonymous memory, aligned to huge pages, which the system is asked to use (MADV_HUGEPAGE). Initially zero; unmapped
// by the destructor. Movable, not copyable.
class HugeBuffer {
  public:
    HugeBuffer() = default;
    explicit HugeBuffer(int64_t bytes);  // throws std::bad_alloc
    ~HugeBuffer();
    HugeBuffer(HugeBuffer&& other) noexcept : at_(other.at_), bytes_(other.bytes_) { other.at_ = nullptr; }
    HugeBuffer& operator=(HugeBuffer&& other) noexcept {
        std::swap(at_, other.at_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    template <class T = uint8_t>
    T* as() const {
        return reinterpret_cast<T*>(at_);
    }

  private:
    uint8_t* at_ = nullptr;
    int64_t bytes_ = 0;
};

// What `work` returns, or -1 if there was not enough memory for it: no exception may leave the C interface.
template <class Work>
auto or_out_of_memory(const Work& work) -> decltype(work()) {
    try {
        return work();
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

}  // namespace kvl
