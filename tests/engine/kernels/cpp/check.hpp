// Shared by the kernels' tests: reproducible noise, and comparisons that count and print differences.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

inline int failures = 0;
inline std::mt19937 generator(7);

inline std::vector<float> noise(int64_t count, float size = 1.0f) {
    std::normal_distribution<float> normal(0.0f, size);
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = normal(generator);
    return values;
}

inline void near(double got, double want, double tolerance, const char* what, int64_t a, int64_t b) {
    if (std::fabs(got - want) <= tolerance) return;
    failures++;
    std::printf("%s (%ld, %ld): got %g, want %g\n", what, long(a), long(b), got, want);
}
