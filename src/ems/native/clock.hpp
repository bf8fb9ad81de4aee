// The clock of deadlines.
#pragma once

#include <cstdint>
#include <ctime>

namespace ems {

// Of the clock that Python's time.monotonic() reads.
inline int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

}  // namespace ems
