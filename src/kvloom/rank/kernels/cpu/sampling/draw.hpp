// How a step's threads choose the next token of a row.
#pragma once

#include "abi.h"
#include "runtime/pool.hpp"

namespace kvl {

// See kvl_draw; in a thread where tiny numbers are 0.
int32_t draw(const float* logits, int64_t count, const kvl_draw_rules& rules);

// See kvl_uniform.
double uniform(uint64_t seed, uint64_t position);

}  // namespace kvl
