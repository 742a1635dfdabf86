/* Loaded before libc (LD_PRELOAD) into a server of tests: counts its operations on files and
   connections, from whatever library they come. At the n-th after test_arm(n) the process is killed.
   While the file named by TEST_DISK_FULL exists, writes to regular files (but the log) fail as
   those to a full disk do: the first one writes half of its bytes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static long left = 0, counted = 0;

void test_arm(long n) { __atomic_store_n(&left, n, __ATOMIC_SEQ_CST); }
long test_count(void) { return __atomic_load_n(&counted, __ATOMIC_SEQ_CST); }

static void step(void) {
    __atomic_add_fetch(&counted, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&left, __ATOMIC_SEQ_CST) > 0 && __atomic_sub_fetch(&left, 1, __ATOMIC_SEQ_CST) == 0)
        kill(getpid(), SIGKILL);
}

static int is_full(int fd) {
    struct stat status;
    const char *flag = getenv("TEST_DISK_FULL");
    return flag && fd > 2 && access(flag, F_OK) == 0 && fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
}

#define REAL(result, name, types) static result (*real)types; if (!real) real = (result (*)types)dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *bytes, size_t length) {
    REAL(ssize_t, write, (int, const void *, size_t));
    step();
    if (is_full(fd)) {
        if (length > 1 && lseek(fd, 0, SEEK_CUR) == 0) return real(fd, bytes, length / 2);
        errno = ENOSPC;
        return -1;
    }
    return real(fd, bytes, length);
}

ssize_t pwrite64(int fd, const void *bytes, size_t length, off64_t offset) {
    REAL(ssize_t, pwrite64, (int, const void *, size_t, off64_t));
    step();
    if (is_full(fd)) { errno = ENOSPC; return -1; }
    return real(fd, bytes, length, offset);
}

ssize_t pwrite(int fd, const void *bytes, size_t length, off_t offset) { return pwrite64(fd, bytes, length, offset); }

#define COUNTED(result, name, types, values) result name types { REAL(result, name, types); step(); return real values; }
COUNTED(int, fsync, (int fd), (fd))
COUNTED(int, fdatasync, (int fd), (fd))
COUNTED(int, ftruncate, (int fd, off_t length), (fd, length))
COUNTED(int, ftruncate64, (int fd, off64_t length), (fd, length))
COUNTED(int, rename, (const char *from, const char *to), (from, to))
COUNTED(int, unlink, (const char *path), (path))
COUNTED(int, link, (const char *from, const char *to), (from, to))
COUNTED(ssize_t, recv, (int fd, void *bytes, size_t length, int flags), (fd, bytes, length, flags))
COUNTED(ssize_t, send, (int fd, const void *bytes, size_t length, int flags), (fd, bytes, length, flags))
