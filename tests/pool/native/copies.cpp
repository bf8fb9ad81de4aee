// Exports the copies of copies.hpp and sums.hpp, each instruction set's copies of lines by number, for
// test_native_copies.py.
#include "sums.hpp"

extern "C" {

// Whether this processor has the instruction set of each function, numbered as in `copy`.
int has(int which) {
#ifdef __x86_64__
    return which == 0 || __builtin_cpu_supports("avx512f");
#else
    return which < 0;
#endif
}

void copy(int which, uint8_t* target, uint8_t* kept, const uint8_t* source, size_t size) {
#ifdef __x86_64__
    (which == 0 ? ems::copy_lines_sse2 : ems::copy_lines_avx512)(target, kept, source, size);
#endif
    ems::finish_copies();
}

// The same for the functions that write no second copy.
void move(int which, uint8_t* target, const uint8_t* source, size_t size) {
#ifdef __x86_64__
    (which == 0 ? ems::move_lines_sse2 : ems::move_lines_avx512)(target, source, size, source);
#endif
}

void copy_ahead(uint8_t* target, const uint8_t* source, size_t size) {
    ems::copy_ahead(target, source, size, source);
}

void copy_summed(const ems::Xxh3* xxh3, uint8_t* target, const uint8_t* source, size_t size, uint8_t* sum) {
    ems::SummedCopy copy(*xxh3);
    const ems::Sum found = copy(target, source, size);
    std::memcpy(sum, found.data(), found.size());
}

}  // extern "C"
