/* Makes calls on files below a folder fail, as a broken, full or remounted disk does. The file that FAILING_DISK names is
 * read at every call, so a test can break the disk and mend it while a process runs: ERRNO, operations, folder. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static int fails(const char *operation, const char *path) {
    const char *orders = getenv("FAILING_DISK");
    char text[PATH_MAX + 128] = {0}, operations[64], folder[PATH_MAX];
    int number, saved = errno;
    if (!orders || !path) return 0;
    /* system calls, because the functions of this name are the ones below */
    int file = syscall(SYS_openat, AT_FDCWD, orders, O_RDONLY | O_CLOEXEC);
    if (file < 0) { errno = saved; return 0; }
    long size = syscall(SYS_read, file, text, sizeof text - 1);
    close(file);
    errno = saved;
    if (size <= 0 || sscanf(text, "%d %63s %[^\n]", &number, operations, folder) != 3) return 0;
    if (!strstr(operations, operation) || strncmp(path, folder, strlen(folder))) return 0;
    errno = number;
    return 1;
}

static int fails_at(const char *operation, int file) {
    char link[64], path[PATH_MAX] = {0};
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    long size = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    errno = saved;
    return size > 0 && fails(operation, path);
}

static int fails_to_open(const char *path, int flags) {
    char whole[PATH_MAX];
    if (!path || !getenv("FAILING_DISK")) return 0;
    if (path[0] != '/' && getcwd(whole, sizeof whole)) strncat(strcat(whole, "/"), path, sizeof whole - strlen(whole) - 1);
    else snprintf(whole, sizeof whole, "%s", path);
    return fails(flags & (O_WRONLY | O_RDWR | O_CREAT) ? "create" : "open", whole);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define ON_FILE(type, operation, name, parameters, arguments) \
    type name parameters { return fails_at(operation, fd) ? -1 : NEXT(name) arguments; }
#define ON_PATH(name, parameters, arguments) \
    int name parameters { return fails_to_open(path, O_CREAT) ? -1 : NEXT(name) arguments; }
#define OPENS(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        return fails_to_open(path, flags) ? -1 : NEXT(name)(path, flags, mode); }
#define OPENS_AT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        return fails_to_open(path, flags) ? -1 : NEXT(name)(folder, path, flags, mode); }
#define OPENS_STREAM(name) \
    FILE *name(const char *path, const char *mode) { \
        return fails_to_open(path, mode[0] == 'r' && !strchr(mode, '+') ? 0 : O_CREAT) ? NULL : NEXT(name)(path, mode); }

ON_FILE(ssize_t, "write", write, (int fd, const void *data, size_t size), (fd, data, size))
ON_FILE(ssize_t, "write", pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
ON_FILE(ssize_t, "write", pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
ON_FILE(ssize_t, "write", writev, (int fd, const struct iovec *parts, int count), (fd, parts, count))
ON_FILE(int, "write", ftruncate, (int fd, off_t size), (fd, size))
ON_FILE(int, "write", ftruncate64, (int fd, off64_t size), (fd, size))
ON_FILE(int, "sync", fsync, (int fd), (fd))
ON_FILE(int, "sync", fdatasync, (int fd), (fd))
ON_FILE(ssize_t, "read", read, (int fd, void *data, size_t size), (fd, data, size))
ON_FILE(ssize_t, "read", pread, (int fd, void *data, size_t size, off_t at), (fd, data, size, at))
ON_FILE(ssize_t, "read", pread64, (int fd, void *data, size_t size, off64_t at), (fd, data, size, at))
ON_PATH(mkdir, (const char *path, mode_t mode), (path, mode))
ON_PATH(unlink, (const char *path), (path))
ON_PATH(rmdir, (const char *path), (path))
ON_PATH(rename, (const char *path, const char *to), (path, to))
ON_PATH(link, (const char *path, const char *to), (path, to))
OPENS(open)
OPENS(open64)
OPENS_AT(openat)
OPENS_AT(openat64)
OPENS_STREAM(fopen)
OPENS_STREAM(fopen64)
