// Reads a Python caller's arguments (lists, tuples and arrays of integers) through functions of Python's stable ABI,
// whose addresses Python passes. The interpreter lock must be held.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

extern "C" {

struct PyObject;

// Py_buffer of the stable ABI.
struct EmsBuffer {
    void* memory;
    PyObject* owner;
    ptrdiff_t bytes;
    ptrdiff_t item_bytes;
    int is_readonly;
    int num_dimensions;
    const char* format;
    ptrdiff_t* shape;
    ptrdiff_t* strides;
    ptrdiff_t* suboffsets;
    void* internal;
};

// Addresses of the functions, in the order in which Python passes them, and of four types.
struct EmsPython {
    ptrdiff_t (*list_size)(PyObject* list);
    PyObject* (*list_item)(PyObject* list, ptrdiff_t index);  // returns a borrowed reference
    ptrdiff_t (*tuple_size)(PyObject* tuple);
    PyObject* (*tuple_item)(PyObject* tuple, ptrdiff_t index);
    PyObject* (*type_of)(PyObject* of);                       // returns a new reference
    void (*release)(PyObject* of);
    long long (*as_signed)(PyObject* integer);  // on failure returns -1 and sets a Python error
    unsigned long long (*as_unsigned)(PyObject* integer);
    PyObject* (*error)();
    void (*forget_error)();
    int (*get_buffer)(PyObject* of, EmsBuffer* buffer, int flags);
    void (*release_buffer)(EmsBuffer* buffer);
    void* (*unlock)();
    void (*lock)(void* state);
    PyObject* list;
    PyObject* tuple;
    PyObject* integer;
    PyObject* array;  // numpy.ndarray
};

}  // extern "C"

namespace ems {

// 64-bit integers that a caller gave: signed, or unsigned if one is too large for a signed one.
class Given {
  public:
    const int64_t* data() const { return values_.data(); }
    const uint64_t* bits() const { return reinterpret_cast<const uint64_t*>(values_.data()); }
    int64_t size() const { return static_cast<int64_t>(values_.size()); }
    bool is_signed() const { return is_signed_; }

    void fill(size_t count, int64_t value) { values_.assign(count, value); }

    // Reads exactly a list or tuple of integers, or a one-dimensional array of signed ones; false = it is something
    // else, which is left to Python. may_be_large: integers may need all 64 bits; then none is negative.
    bool read(const EmsPython& python, PyObject* from, bool may_be_large) {
        is_signed_ = true;
        if (is_a(python, from, python.list)) {
            return read_items(python, from, python.list_size(from), python.list_item, may_be_large);
        }
        if (is_a(python, from, python.tuple)) {
            return read_items(python, from, python.tuple_size(from), python.tuple_item, may_be_large);
        }
        return is_a(python, from, python.array) && read_array(python, from);
    }

  private:
    static constexpr int kContiguous = 0x8 | 0x4;  // PyBUF_ND | PyBUF_FORMAT

    static bool is_a(const EmsPython& python, PyObject* object, PyObject* type) {
        PyObject* found = python.type_of(object);
        python.release(found);
        return found == type;
    }

    using Item = PyObject* (*)(PyObject* of, ptrdiff_t index);

    bool read_items(const EmsPython& python, PyObject* from, ptrdiff_t count, Item item_of, bool may_be_large) {
        values_.resize(static_cast<size_t>(count));
        bool has_negative = false;
        for (ptrdiff_t i = 0; i < count; i++) {
            PyObject* item = item_of(from, i);
            if (!is_a(python, item, python.integer)) {
                return false;
            }
            int64_t value = is_signed_ ? python.as_signed(item) : large(python, item);
            if (value == -1 && has_failed(python)) {
                if (!is_signed_ || !may_be_large || has_negative) {
                    return false;
                }
                is_signed_ = false;
                value = large(python, item);
                if (value == -1 && has_failed(python)) {
                    return false;
                }
            }
            has_negative = has_negative || (is_signed_ && value < 0);
            values_[static_cast<size_t>(i)] = value;
        }
        return true;
    }

    static int64_t large(const EmsPython& python, PyObject* item) {
        return static_cast<int64_t>(python.as_unsigned(item));
    }

    static bool has_failed(const EmsPython& python) {
        const bool has = python.error() != nullptr;
        if (has) {
            python.forget_error();
        }
        return has;
    }

    bool read_array(const EmsPython& python, PyObject* array) {
        EmsBuffer buffer;
        if (python.get_buffer(array, &buffer, kContiguous) != 0) {
            python.forget_error();
            return false;
        }
        const bool is_plain = buffer.num_dimensions == 1 && buffer.item_bytes == sizeof(int64_t) &&
                              (std::strcmp(buffer.format, "l") == 0 || std::strcmp(buffer.format, "q") == 0);
        if (is_plain) {
            const auto* values = static_cast<const int64_t*>(buffer.memory);
            values_.assign(values, values + buffer.bytes / sizeof *values);
        }
        python.release_buffer(&buffer);
        return is_plain;
    }

    std::vector<int64_t> values_;
    bool is_signed_ = true;
};

// Releases the interpreter lock during its lifetime.
class Unlocked {
  public:
    explicit Unlocked(const EmsPython& python) : python_(python), state_(python.unlock()) {}
    ~Unlocked() { python_.lock(state_); }

  private:
    const EmsPython& python_;
    void* state_;
};

// A caller's arguments for a batch of blocks: slots, hashes, and the number of tokens of each block.
struct GivenBlocks {
    Given slots, hashes, counts;

    // Reads all three; false = some are not plain, or there are not as many hashes as counts.
    bool read(const EmsPython& python, PyObject* const* from) {
        return slots.read(python, from[0], false) && hashes.read(python, from[1], true) &&
               counts.read(python, from[2], false) && hashes.size() == counts.size();
    }
};

}  // namespace ems
