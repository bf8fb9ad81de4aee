/* Messages for developers about failed calls: one line each on stderr if GEWU_LOG is set. The app gets error codes
 * only. */
#include "internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* Logs one line, formatted as by printf, if logging is on. stderr may block, so the lock must not be held. */
void gewu_log(const char *format, ...)
{
    char line[1024];
    const char *wish = getenv("GEWU_LOG");
    va_list arguments;
    if (wish == NULL || *wish == '\0' || *wish == '0') {
        return;
    }
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    fprintf(stderr, "libqos: %s\n", line);
}
