// The tests' program: all kernels and their tests as one unit, so that shared headers are compiled once.
// test_cpu_native.py compiles it with sanitizers and runs it; its argument names the tests; it exits with 1 if there
// are differences.
#include <string>

#include "attention/heads.cpp"
#include "attention/latent.cpp"
#include "experts/experts.cpp"
#include "linear/way.cpp"
#include "lora/lora.cpp"
#include "mixers/convolution.cpp"
#include "mixers/delta_rule.cpp"
#include "mixers/mamba2.cpp"
#include "mixers/mixer.cpp"
#include "mixers/short_conv.cpp"
#include "model/pack.cpp"
#include "runtime/memory.cpp"
#include "runtime/pool.cpp"
#include "sampling/draw.cpp"
#include "step/asked.cpp"
#include "step/branch.cpp"
#include "step/fused.cpp"
#include "step/step.cpp"

#include "kernels_test.cpp"
#include "latents_test.cpp"
#include "mixers_test.cpp"
#include "step_test.cpp"

int main(int, char** argv) {
    const std::string tests = argv[1];
    if (tests == "kernels") test_mixers();
    tests == "kernels" ? test_every_kernel() : tests == "steps" ? test_whole_steps() : test_threads();
    if (tests != "kernels") test_latents();
    std::printf("%s: %d differences\n", kvl_isa(), failures);
    return failures != 0;
}
