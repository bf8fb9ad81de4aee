/* Frames as bytes: a header line "op a b c d length", then `length` bytes. */
#include "internal.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

/* Writes the header line of a frame; returns its length. */
size_t gewu_write_header(const struct frame *frame, char header[GEWU_HEADER_SIZE])
{
    return (size_t)snprintf(header, GEWU_HEADER_SIZE, "%c %u %u %u %u %zu\n", frame->op, frame->a, frame->b, frame->c,
        frame->d, frame->length);
}

/* Reads a space and a decimal number up to `max`, and advances *at past it. False if there is none. */
static bool read_number(const char **at, unsigned max, unsigned *number)
{
    unsigned long long value = 0;
    const char *digit = *at + 1;
    if (**at != ' ' || *digit < '0' || *digit > '9') {
        return false;
    }
    for (; *digit >= '0' && *digit <= '9'; digit++) {
        value = value * 10 + (unsigned)(*digit - '0');
        if (value > max) {
            return false;
        }
    }
    *at = digit;
    *number = (unsigned)value;
    return true;
}

/* Decodes a header line. False if it is malformed. */
static bool read_header(const char *header, struct frame *frame)
{
    const char *at = header + 1;
    unsigned length;
    frame->op = header[0];
    if (!read_number(&at, UINT_MAX, &frame->a) || !read_number(&at, UINT_MAX, &frame->b)
        || !read_number(&at, UINT_MAX, &frame->c) || !read_number(&at, UINT_MAX, &frame->d)
        || !read_number(&at, GEWU_MAX_PAYLOAD, &length) || *at != '\n') {
        return false;
    }
    frame->length = length;
    return true;
}

/* Receives until there is a byte at source->bytes[source->start]; false at the end of the connection or on an error. */
static bool fill(struct source *source)
{
    while (source->start == source->end) {
        ssize_t count = recv(source->fd, source->bytes, sizeof source->bytes, 0);
        if (count == 0 || (count < 0 && errno != EINTR)) {
            return false;
        }
        source->start = 0;
        source->end = count < 0 ? 0 : (size_t)count;
    }
    return true;
}

/* Reads a frame and its payload (NUL-terminated), which the caller must free. False at the stream's end or on an error.
 * */
bool gewu_read_frame(struct source *source, struct frame *frame, char **payload)
{
    char header[GEWU_HEADER_SIZE];
    size_t length = 0;
    do {
        if (length + 1 == sizeof header || !fill(source)) {
            return false;
        }
        header[length++] = source->bytes[source->start++];
    } while (header[length - 1] != '\n');
    header[length] = '\0';
    if (!read_header(header, frame) || (*payload = malloc(frame->length + 1)) == NULL) {
        return false;
    }
    for (size_t used = 0, count; used < frame->length; used += count) {
        if (!fill(source)) {
            free(*payload);
            return false;
        }
        count = source->end - source->start;
        count = count < frame->length - used ? count : frame->length - used;
        memcpy(*payload + used, source->bytes + source->start, count);
        source->start += count;
    }
    (*payload)[frame->length] = '\0';
    return true;
}
