// The clock by which deadlines are measured.
#pragma once

#include <cstdint>
#include <ctime>

namespace ems {

// The current time in nanoseconds of CLOCK_MONOTONIC, which Python's time.monotonic() reads too.
inline int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

}  // namespace ems
