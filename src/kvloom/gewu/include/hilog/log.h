/*
 * hilog/log.h - the platform's log calls, for programs that are built elsewhere: they write lines to stderr.
 * Header only. Values marked private are printed too, because it is meant for developers' machines.
 */
#ifndef HILOG_LOG_H
#define HILOG_LOG_H

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#ifndef LOG_DOMAIN
#define LOG_DOMAIN 0
#endif
#ifndef LOG_TAG
#define LOG_TAG NULL
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { LOG_APP = 0 } LogType;

typedef enum {
    LOG_DEBUG = 3,
    LOG_INFO = 4,
    LOG_WARN = 5,
    LOG_ERROR = 6,
    LOG_FATAL = 7
} LogLevel;

/* Copies `format` without the platform's "{public}" and "{private}" marks, which printf does not know. */
static inline void HiLogPlainFormat(char *plain, size_t size, const char *format)
{
    size_t used = 0;
    while (*format != '\0' && used + 1 < size) {
        plain[used] = *format++;
        if (plain[used++] != '%') {
            continue;
        }
        if (*format == '%' && used + 1 < size) {
            plain[used++] = *format++;
        } else if (strncmp(format, "{public}", 8) == 0) {
            format += 8;
        } else if (strncmp(format, "{private}", 9) == 0) {
            format += 9;
        }
    }
    plain[used] = '\0';
}

/* Writes one line to stderr; returns the number of characters of the message, negative on error. */
static inline int OH_LOG_Print(LogType type, LogLevel level, unsigned int domain, const char *tag, const char *format,
    ...)
{
    char plain[1024];
    char message[2048];
    va_list arguments;
    int length;
    (void)type;
    HiLogPlainFormat(plain, sizeof plain, format);
    va_start(arguments, format);
    length = vsnprintf(message, sizeof message, plain, arguments);
    va_end(arguments);
    fprintf(stderr, "%c %05x/%s: %s\n", "???DIWEF"[level & 7], domain, tag != NULL ? tag : "", message);
    return length;
}

#define OH_LOG_DEBUG(type, ...) ((void)OH_LOG_Print((type), LOG_DEBUG, LOG_DOMAIN, LOG_TAG, __VA_ARGS__))
#define OH_LOG_INFO(type, ...) ((void)OH_LOG_Print((type), LOG_INFO, LOG_DOMAIN, LOG_TAG, __VA_ARGS__))
#define OH_LOG_WARN(type, ...) ((void)OH_LOG_Print((type), LOG_WARN, LOG_DOMAIN, LOG_TAG, __VA_ARGS__))
#define OH_LOG_ERROR(type, ...) ((void)OH_LOG_Print((type), LOG_ERROR, LOG_DOMAIN, LOG_TAG, __VA_ARGS__))
#define OH_LOG_FATAL(type, ...) ((void)OH_LOG_Print((type), LOG_FATAL, LOG_DOMAIN, LOG_TAG, __VA_ARGS__))

#ifdef __cplusplus
}
#endif
#endif /* HILOG_LOG_H */
