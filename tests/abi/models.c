/* What Create opens: models FILE. Each NUL-terminated text of FILE is attributes; prints an inode or 0 for each. */
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"

int gewu_open_model(const char *attributes, int *error);

int main(int argc, char **argv)
{
    struct stat status;
    int error, file = argc == 2 ? open(argv[1], O_RDONLY) : -1;
    CHECK(file >= 0 && fstat(file, &status) == 0);
    size_t size = (size_t)status.st_size;
    char *texts = malloc(size);
    CHECK(texts != NULL && read(file, texts, size) == (ssize_t)size);
    for (char *text = texts; text < texts + size; text += strlen(text) + 1) {
        char *copy = strdup(text);  /* so that a sanitizer sees its end */
        int fd = gewu_open_model(copy, &error);
        CHECK((fd < 0) == (error != 0));
        printf("%lu\n", fd >= 0 && fstat(fd, &status) == 0 ? (unsigned long)status.st_ino : 0UL);
        if (fd >= 0) {
            close(fd);
        }
        free(copy);
    }
    free(texts);
    return 0;
}
