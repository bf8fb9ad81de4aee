// The tests' program: all kernels and their tests as one unit, so that what several of them use is compiled once. Run by
// test_cpu_native.py, compiled with a sanitizer; its argument says which tests; exits 1 if anything differs.
#include <string>

#include "attention/heads.cpp"
#include "experts/experts.cpp"
#include "linear/way.cpp"
#include "lora/lora.cpp"
#include "model/pack.cpp"
#include "runtime/memory.cpp"
#include "runtime/pool.cpp"
#include "sampling/draw.cpp"
#include "step/asked.cpp"
#include "step/fused.cpp"
#include "step/step.cpp"

#include "kernels_test.cpp"
#include "step_test.cpp"

int main(int, char** argv) {
    const std::string tests = argv[1];
    tests == "kernels" ? test_every_kernel() : tests == "steps" ? test_whole_steps() : test_threads();
    std::printf("%s: %d differences\n", kvl_isa(), failures);
    return failures != 0;
}
