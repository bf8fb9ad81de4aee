/* Included before the library's own files: its calls wait for the service as long as a test's app says meanwhile. */
#ifndef PATIENCE_H
#define PATIENCE_H

#include <stdlib.h>

/* Milliseconds. */
static inline int test_patience(void)
{
    const char *said = getenv("TEST_PATIENCE_MS");
    return said != NULL ? atoi(said) : 60000;
}

#endif
