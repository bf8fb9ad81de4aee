// Drawing a token from a row of logits.
#pragma once

#include "abi.h"
#include "runtime/pool.hpp"

namespace kvl {

// See kvl_draw. The calling thread must treat subnormal floats as 0 (TinyIsZero), so that all callers get the same
// token.
int32_t draw(const float* logits, int64_t count, const kvl_draw_rules& rules);

// See kvl_uniform.
double uniform(uint64_t seed, uint64_t position);

}  // namespace kvl
