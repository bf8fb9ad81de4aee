#include "wire.hpp"

#include <cerrno>
#include <sys/socket.h>
#include <unistd.h>

namespace kvloom {

Packer &Packer::PutText(const void *bytes, size_t length)
{
    /* a text that is too long makes the message too long, which Take detects */
    Put(static_cast<uint32_t>(length));
    bytes_.append(static_cast<const char *>(bytes), length);
    return *this;
}

Packer &Packer::PutText(const std::string &text)
{
    return PutText(text.data(), text.size());
}

std::string Packer::Take()
{
    const size_t length = bytes_.size() - sizeof(uint32_t);
    if (length > MAX_MESSAGE) {
        return "";
    }
    const auto written = static_cast<uint32_t>(length);
    std::memcpy(&bytes_[0], &written, sizeof written);
    return std::move(bytes_);
}

const char *Unpacker::Take(size_t length)
{
    is_good_ = is_good_ && length <= bytes_.size() - at_;
    if (!is_good_) {
        return nullptr;
    }
    at_ += length;
    return bytes_.data() + at_ - length;
}

std::string Unpacker::TakeText()
{
    const size_t length = Take<uint32_t>();
    const char *from = Take(length);
    return from == nullptr ? std::string() : std::string(from, length);
}

/* Reads exactly `length` bytes; false if the stream ends before. */
static bool ReadAll(int fd, char *to, size_t length)
{
    while (length > 0) {
        const ssize_t count = recv(fd, to, length, 0);
        if (count < 0 && errno == EINTR) {
            continue;
        }
        if (count <= 0) {
            return false;
        }
        to += count;
        length -= static_cast<size_t>(count);
    }
    return true;
}

Reading ReadMessage(int fd, std::string *message)
{
    uint32_t length = 0;
    if (!ReadAll(fd, reinterpret_cast<char *>(&length), sizeof length)) {
        return Reading::END;
    }
    if (length == 0 || length > MAX_MESSAGE) {
        return Reading::BROKEN;
    }
    message->resize(length);
    return ReadAll(fd, &(*message)[0], length) ? Reading::MESSAGE : Reading::END;
}

bool WriteMessage(int fd, const std::string &message)
{
    for (size_t sent = 0; sent < message.size();) {
        const ssize_t count = send(fd, message.data() + sent, message.size() - sent, MSG_NOSIGNAL);
        if (count < 0 && errno != EINTR) {
            return false;
        }
        sent += count < 0 ? 0 : static_cast<size_t>(count);
    }
    return true;
}

}
