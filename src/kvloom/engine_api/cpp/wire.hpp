/*
 * Messages between this library and the engine's host, which runs on the same machine. A message is a uint32 with the
 * number of bytes that follow, one byte for its kind, and its fields, in the machine's byte order. A text is a uint32
 * with its length in bytes, and the bytes. wire.py lists the messages.
 */
#ifndef KVLOOM_WIRE_HPP
#define KVLOOM_WIRE_HPP

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

namespace kvloom {

constexpr uint32_t PROTOCOL = 1;              /* version, as in wire.py; each side sends its own in its first message */
constexpr uint32_t MAX_MESSAGE = 64U << 20U;  /* bytes */

/* Builds a message. */
class Packer {
public:
    explicit Packer(char kind) : bytes_(sizeof(uint32_t), '\0')
    {
        Put(kind);
    }

    template <typename Number> Packer &Put(Number number)
    {
        static_assert(std::is_arithmetic<Number>::value, "texts go by PutText");
        bytes_.append(reinterpret_cast<const char *>(&number), sizeof number);
        return *this;
    }

    Packer &PutText(const void *bytes, size_t length);
    Packer &PutText(const std::string &text);

    /* Returns the message, "" if it is longer than MAX_MESSAGE. Nothing may be put afterwards. */
    std::string Take();

private:
    std::string bytes_;
};

/* Reads the fields of a message. Reading beyond its end gives zeros, and makes IsGood false. */
class Unpacker {
public:
    explicit Unpacker(std::string bytes) : bytes_(std::move(bytes)) {}

    template <typename Number> Number Take()
    {
        Number number{};
        if (const char *from = Take(sizeof number)) {
            std::memcpy(&number, from, sizeof number);
        }
        return number;
    }

    std::string TakeText();

    template <typename Number> std::vector<Number> TakeNumbers()
    {
        const size_t count = Take<uint32_t>();
        const char *from = Take(count * sizeof(Number));
        std::vector<Number> numbers(from == nullptr ? 0 : count);
        if (!numbers.empty()) {
            std::memcpy(numbers.data(), from, count * sizeof(Number));
        }
        return numbers;
    }

    bool IsGood() const { return is_good_; }

private:
    const char *Take(size_t length);

    std::string bytes_;
    size_t at_ = 0;
    bool is_good_ = true;
};

enum class Reading { MESSAGE, END, BROKEN };

/* Receives one message, without its length. END = the peer has closed; BROKEN = the length is out of range. */
Reading ReadMessage(int fd, std::string *message);

/* Writes a whole message. False if the peer has closed. */
bool WriteMessage(int fd, const std::string &message);

}

#endif
