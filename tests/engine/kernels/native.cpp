// The tests' program: all kernels and their tests as one unit, so that what several of them use is compiled once. Run by
// test_cpu_native.py, compiled with a sanitizer; its argument says which tests; exits 1 if anything differs.
#include <string>

#include "asked.cpp"
#include "draw.cpp"
#include "experts.cpp"
#include "fused.cpp"
#include "heads.cpp"
#include "lora.cpp"
#include "memory.cpp"
#include "pack.cpp"
#include "pool.cpp"
#include "step.cpp"
#include "way.cpp"

#include "kernels_test.cpp"
#include "step_test.cpp"

int main(int, char** argv) {
    const std::string tests = argv[1];
    tests == "kernels" ? test_every_kernel() : tests == "steps" ? test_whole_steps() : test_threads();
    std::printf("%s: %d differences\n", kvl_isa(), failures);
    return failures != 0;
}
