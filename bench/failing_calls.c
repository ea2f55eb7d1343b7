/* A shim to preload: the nth call of a kind that touches a watched folder fails once, or the process dies there.
 *
 * bench/torture_calls.py compiles it and arms it through ctypes; unarmed it only counts. A call is watched where its
 * path, or the file that its descriptor is open on, lies below one of the folders. What libc calls inside itself is
 * not seen; Python calls what is here.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <dirent.h>
#include <unistd.h>

#define KINDS 32
#define FOLDERS 4
static const char *names[KINDS];
static atomic_long seen[KINDS];
static char folders[FOLDERS][4096];
static const char *armed_kind;
static long armed_nth;
static int armed_errno; /* below 0: die by SIGKILL */
static volatile int watching;

void watch(const char *one, const char *other) {
    snprintf(folders[0], sizeof folders[0], "%s", one);
    snprintf(folders[1], sizeof folders[1], "%s", other);
    for (int i = 0; i < KINDS; i++) atomic_store(&seen[i], 0);
    watching = 1;
}
void arm(const char *kind, long nth, int error) {
    static char kept[32];
    snprintf(kept, sizeof kept, "%s", kind);
    armed_nth = nth, armed_errno = error, armed_kind = kept;
}
long counted(const char *kind) {
    for (int i = 0; i < KINDS && names[i]; i++)
        if (!strcmp(names[i], kind)) return atomic_load(&seen[i]);
    return 0;
}

static int below(const char *path) {
    for (int i = 0; i < FOLDERS; i++) {
        size_t n = strlen(folders[i]);
        if (n && !strncmp(path, folders[i], n) && (path[n] == '/' || !path[n] || path[n] == ' ')) return 1;
    }
    return 0;
}
static int of_fd(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long n = syscall(SYS_readlink, link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return below(path);
}
static int of_path(int at, const char *path) {
    if (!path) return 0;
    if (path[0] == '/') return below(path);
    return at == AT_FDCWD ? 0 : of_fd(at);
}
/* The errno with which this call is to fail; 0 where it is to be made. */
static int fails(const char *kind, int is_watched) {
    if (!watching || !is_watched) return 0;
    int i = 0;
    while (i < KINDS && names[i] && strcmp(names[i], kind)) i++;
    if (i == KINDS) return 0;
    names[i] = kind;
    long nth = atomic_fetch_add(&seen[i], 1) + 1;
    if (!armed_kind || strcmp(armed_kind, kind) || nth != armed_nth) return 0;
    if (armed_errno < 0) kill(getpid(), SIGKILL);
    return armed_errno;
}
#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define FAIL(kind, is_watched, wrong) do { int e = fails(kind, is_watched); if (e) { errno = e; return wrong; } } while (0)
#define OF_FD(kind, name, type, params, args, wrong) \
    type name params { int saved = errno; FAIL(kind, of_fd(fd), wrong); errno = saved; REAL(name); return real args; }
#define OF_PATH(kind, name, type, params, args, at, path, wrong) \
    type name params { int saved = errno; FAIL(kind, of_path(at, path), wrong); errno = saved; REAL(name); return real args; }

OF_FD("fsync", fsync, int, (int fd), (fd), -1)
OF_FD("fsync", fdatasync, int, (int fd), (fd), -1)
OF_FD("flock", flock, int, (int fd, int how), (fd, how), -1)
OF_FD("pwrite", pwrite64, ssize_t, (int fd, const void *b, size_t n, off64_t o), (fd, b, n, o), -1)
OF_FD("write", write, ssize_t, (int fd, const void *b, size_t n), (fd, b, n), -1)
OF_FD("read", read, ssize_t, (int fd, void *b, size_t n), (fd, b, n), -1)
OF_FD("pread", preadv64v2, ssize_t, (int fd, const struct iovec *v, int n, off64_t o, int f), (fd, v, n, o, f), -1)
OF_FD("pread", pread64, ssize_t, (int fd, void *b, size_t n, off64_t o), (fd, b, n, o), -1)
OF_FD("ftruncate", ftruncate64, int, (int fd, off64_t n), (fd, n), -1)
OF_FD("fstat", fstat64, int, (int fd, struct stat64 *s), (fd, s), -1)
OF_FD("close", close, int, (int fd), (fd), -1)
OF_FD("sync_file_range", sync_file_range, int, (int fd, off64_t o, off64_t n, unsigned f), (fd, o, n, f), -1)
OF_FD("statvfs", fstatvfs64, int, (int fd, struct statvfs64 *s), (fd, s), -1)
OF_FD("utimens", futimens, int, (int fd, const struct timespec t[2]), (fd, t), -1)
OF_FD("chmod", fchmod, int, (int fd, mode_t m), (fd, m), -1)
OF_FD("opendir", fdopendir, DIR *, (int fd), (fd), NULL)
OF_PATH("rename", rename, int, (const char *a, const char *b), (a, b), AT_FDCWD, b, -1)
OF_PATH("rename", renameat, int, (int d, const char *a, int into, const char *b), (d, a, into, b), into, b, -1)
OF_PATH("link", link, int, (const char *a, const char *b), (a, b), AT_FDCWD, b, -1)
OF_PATH("link", linkat, int, (int d, const char *a, int into, const char *b, int f), (d, a, into, b, f), into, b, -1)
OF_PATH("unlink", unlink, int, (const char *a), (a), AT_FDCWD, a, -1)
OF_PATH("rmdir", rmdir, int, (const char *a), (a), AT_FDCWD, a, -1)
OF_PATH("mkdir", mkdir, int, (const char *a, mode_t m), (a, m), AT_FDCWD, a, -1)
OF_PATH("mkdir", mkdirat, int, (int d, const char *a, mode_t m), (d, a, m), d, a, -1)
OF_PATH("stat", stat64, int, (const char *a, struct stat64 *s), (a, s), AT_FDCWD, a, -1)
OF_PATH("stat", lstat64, int, (const char *a, struct stat64 *s), (a, s), AT_FDCWD, a, -1)
OF_PATH("stat", fstatat64, int, (int d, const char *a, struct stat64 *s, int f), (d, a, s, f), d, a, -1)
OF_PATH("opendir", opendir, DIR *, (const char *a), (a), AT_FDCWD, a, NULL)
OF_PATH("statvfs", statvfs64, int, (const char *a, struct statvfs64 *s), (a, s), AT_FDCWD, a, -1)
OF_PATH("utimens", utimensat, int, (int d, const char *a, const struct timespec t[2], int f), (d, a, t, f), d, a, -1)
OF_PATH("chmod", chmod, int, (const char *a, mode_t m), (a, m), AT_FDCWD, a, -1)
OF_PATH("readlink", readlink, ssize_t, (const char *a, char *b, size_t n), (a, b, n), AT_FDCWD, a, -1)

int unlinkat(int d, const char *a, int f) {
    FAIL(f & AT_REMOVEDIR ? "rmdir" : "unlink", of_path(d, a), -1);
    REAL(unlinkat);
    return real(d, a, f);
}
struct dirent64 *readdir64(DIR *d) {
    FAIL("readdir", of_fd(dirfd(d)), NULL);
    REAL(readdir64);
    return real(d);
}
int posix_fallocate64(int fd, off64_t o, off64_t n) { /* these two return their error */
    int e = fails("fallocate", of_fd(fd));
    if (e) return e;
    REAL(posix_fallocate64);
    return real(fd, o, n);
}
int posix_fadvise64(int fd, off64_t o, off64_t n, int a) {
    int e = fails("fadvise", of_fd(fd));
    if (e) return e;
    REAL(posix_fadvise64);
    return real(fd, o, n, a);
}
ssize_t copy_file_range(int a, off64_t *x, int b, off64_t *y, size_t n, unsigned f) {
    FAIL("copy_file_range", of_fd(b), -1);
    REAL(copy_file_range);
    return real(a, x, b, y, n, f);
}
ssize_t sendfile64(int out, int in, off64_t *o, size_t n) {
    FAIL("sendfile", of_fd(out), -1);
    REAL(sendfile64);
    return real(out, in, o, n);
}
int ioctl(int fd, unsigned long request, ...) {
    va_list rest;
    va_start(rest, request);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    FAIL("ioctl", of_fd(fd), -1);
    REAL(ioctl);
    return real(fd, request, argument);
}
static int mode_of(int flags, va_list rest) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0; }
int open64(const char *a, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    int mode = mode_of(flags, rest);
    va_end(rest);
    FAIL("open", of_path(AT_FDCWD, a), -1);
    REAL(open64);
    return real(a, flags, mode);
}
int openat64(int d, const char *a, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    int mode = mode_of(flags, rest);
    va_end(rest);
    FAIL("open", of_path(d, a), -1);
    REAL(openat64);
    return real(d, a, flags, mode);
}
