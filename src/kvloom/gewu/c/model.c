/*
 * Opens the model whose path an app names in Create's attributes. The library passes the open descriptor to the daemon,
 * so the daemon reads only files that the app may read and has named. The daemon validates the JSON; for invalid JSON
 * this file may find any path or none.
 */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

enum { HIGH_SURROGATES = 0xd800, LOW_SURROGATES = 0xdc00, NUM_SURROGATES = 0x400, FIRST_BEYOND_16_BITS = 0x10000 };

/* The value of four hexadecimal digits, or -1. */
static long read_hex(const char *at)
{
    long value = 0;
    for (int i = 0; i < 4; i++) {
        const char *digits = "0123456789abcdef", *digit = at[i] != '\0' ? strchr(digits, at[i] | 0x20) : NULL;
        if (digit == NULL) {
            return -1;
        }
        value = value * 16 + (digit - digits);
    }
    return value;
}

/* Writes a code point as UTF-8; returns the position after it. */
static char *put_utf8(char *out, unsigned long point)
{
    int num_more = point < 0x80 ? 0 : point < 0x800 ? 1 : point < FIRST_BEYOND_16_BITS ? 2 : 3;
    static const unsigned char leads[] = {0, 0xc0, 0xe0, 0xf0};
    *out++ = (char)(leads[num_more] | (point >> (6 * num_more)));
    while (num_more-- > 0) {
        *out++ = (char)(0x80 | ((point >> (6 * num_more)) & 0x3f));
    }
    return out;
}

/* Reads the digits after "\u", and a following low surrogate, as a code point. Returns their end; NULL = invalid. */
static const char *read_unicode(const char *at, unsigned long *point)
{
    long high = read_hex(at), low;
    if (high <= 0 || (high >= LOW_SURROGATES && high < LOW_SURROGATES + NUM_SURROGATES)) {
        return NULL;
    }
    *point = (unsigned long)high;
    if (high < HIGH_SURROGATES || high >= LOW_SURROGATES) {
        return at + 4;
    }
    low = at[4] == '\\' && at[5] == 'u' ? read_hex(at + 6) : -1;
    if (low < LOW_SURROGATES || low >= LOW_SURROGATES + NUM_SURROGATES) {
        return NULL;
    }
    *point = FIRST_BEYOND_16_BITS + ((unsigned long)(high - HIGH_SURROGATES) << 10) + (unsigned long)(low - LOW_SURROGATES);
    return at + 10;
}

/*
 * Reads a JSON string, from after its first quote on, and writes its value, NUL-terminated and never longer, to `out`.
 * Returns the position after its last quote; NULL if it is unterminated, invalid or contains a NUL.
 */
static const char *read_string(const char *at, char *out)
{
    static const char escapes[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
    while (*at != '"') {
        if (*at == '\0') {
            return NULL;
        }
        if (*at != '\\') {
            *out++ = *at++;
            continue;
        }
        const char *escape = at[1] != '\0' ? strchr(escapes, at[1]) : NULL;
        unsigned long point;
        if (escape != NULL) {
            *out++ = meanings[escape - escapes];
            at += 2;
        } else if (at[1] == 'u' && (at = read_unicode(at + 2, &point)) != NULL) {
            out = put_utf8(out, point);
        } else {
            return NULL;
        }
    }
    *out = '\0';
    return at + 1;
}

/* The next character that is not white space. */
static const char *skip_space(const char *at)
{
    return at + strspn(at, " \t\r\n");
}

/*
 * Writes the string in the object's field "model" (the last such field) to `path`. scratch, path: as large as the text.
 * False if there is no such string.
 */
static bool find_model(const char *at, char *scratch, char *path)
{
    bool is_found = false;
    int depth = 0;
    while (*at != '\0') {
        if (*at != '"') {
            depth += (*at == '{' || *at == '[') - (*at == '}' || *at == ']');
            at++;
            continue;
        }
        at = read_string(at + 1, scratch);
        if (at == NULL) {
            return false;
        }
        const char *colon = skip_space(at), *value = *colon == ':' ? skip_space(colon + 1) : NULL;
        if (depth == 1 && value != NULL && strcmp(scratch, "model") == 0) {
            is_found = *value == '"';
            at = is_found ? read_string(value + 1, path) : value;
            if (at == NULL) {
                return false;
            }
        }
    }
    return is_found;
}

/*
 * Opens the model that Create's attributes name. Returns a descriptor, which the caller must close; or -1 with an errno
 * in *error, EINVAL if no path is named. Does not block, not even on a pipe or a device.
 */
int gewu_open_model(const char *attributes, int *error)
{
    size_t size = strlen(attributes) + 1;
    char *scratch = malloc(2 * size), *path = scratch + size;
    int fd = -1;
    *error = ENOMEM;
    if (scratch == NULL) {
        return -1;
    }
    if (find_model(attributes, scratch, path)) {
        do {
            fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
        } while (fd < 0 && errno == EINTR);
        *error = fd < 0 ? errno : 0;
    } else {
        *error = EINVAL;
    }
    free(scratch);
    return fd;
}
