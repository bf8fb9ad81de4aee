// Exports crc.hpp and lookout.hpp for test_native_frames.py.
#include "crc.hpp"
#include "lookout.hpp"

extern "C" {

uint32_t crc(const uint8_t* data, size_t size, uint32_t before) { return ems::crc32(data, size, before); }

// Calls Patience `num` times. was_preempted, has_come: [num] its arguments; looked: [num] whether it allowed spinning.
void look(const uint8_t* was_preempted, const uint8_t* has_come, size_t num, uint8_t* looked) {
    ems::Patience patience;
    for (size_t i = 0; i < num; i++) {
        looked[i] = patience.may_look(was_preempted[i] != 0);
        if (looked[i] != 0) {
            patience.looked(has_come[i] != 0);
        }
    }
}

}  // extern "C"
