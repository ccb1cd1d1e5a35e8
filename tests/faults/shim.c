/* A layer between a program and its C library that counts calls touching one directory and lets
 * the n-th one fail in a chosen way. Loaded with LD_PRELOAD; armed by the variable
 * TOKENMILL_FAULT or, after a fork, by calling tokenmill_arm:
 *
 *     <calls>|<directory>|<n>|<1: every call from the n-th on>|<action>|<errno>
 *
 * Calls are names joined by commas: open write fsync close link rename mkdir. Actions: count
 * (nothing), kill (before the call), die (after it), error (the call is not made), lost (it is
 * made, yet an error is reported), short (half of a write is made). With TOKENMILL_NO_LOCKS set,
 * file locks are granted to whoever asks.
 *
 * Disks are never waited for: what a killed process wrote, the kernel still has.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static char calls[256], directory[4096], action[16];
static long nth, sticky, code, seen;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

void tokenmill_arm(const char *spec) {
    nth = 0;
    seen = 0;
    if (spec != NULL)
        sscanf(spec, "%255[^|]|%4095[^|]|%ld|%ld|%15[^|]|%ld", calls, directory, &nth, &sticky,
               action, &code);
}

long tokenmill_seen(void) { return seen; }

__attribute__((constructor)) static void begin(void) {
    tokenmill_arm(getenv("TOKENMILL_FAULT"));
}

static int named(const char *call) {
    size_t length = strlen(call);
    for (const char *at = calls; at != NULL && *at; at = strchr(at, ',')) {
        if (*at == ',') at++;
        if (strncmp(at, call, length) == 0 && (at[length] == ',' || at[length] == 0)) return 1;
    }
    return 0;
}

/* Whether this call is the one. */
static int struck(const char *call, const char *path) {
    if (nth <= 0 || path == NULL || !named(call)) return 0;
    if (strncmp(path, directory, strlen(directory)) != 0) return 0;
    long number = __atomic_add_fetch(&seen, 1, __ATOMIC_SEQ_CST);
    if (!(number == nth || (sticky && number > nth))) return 0;
    if (strcmp(action, "kill") == 0) kill(getpid(), SIGKILL);
    return strcmp(action, "count") != 0;
}

static int struck_descriptor(const char *call, int descriptor) {
    if (nth <= 0 || !named(call)) return 0;
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    int saved = errno;
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = saved;
    if (length < 0) return 0;
    path[length] = 0;
    return struck(call, path);
}

/* What a struck call reports, given what it would have reported where it is still made. */
#define OUTCOME(made)                                        \
    do {                                                     \
        if (strcmp(action, "die") == 0) {                    \
            (void)!(made);                                         \
            kill(getpid(), SIGKILL);                         \
        }                                                    \
        if (strcmp(action, "lost") == 0 && (made) < 0) return -1; \
        errno = (int)code;                                   \
        return -1;                                           \
    } while (0)

#define OPENING(name)                                                         \
    int name(const char *path, int flags, ...) {                              \
        va_list rest;                                                         \
        va_start(rest, flags);                                                \
        mode_t mode = va_arg(rest, mode_t);                                   \
        va_end(rest);                                                         \
        if (struck("open", path)) OUTCOME(REAL(name)(path, flags, mode));     \
        return REAL(name)(path, flags, mode);                                 \
    }
OPENING(open)
OPENING(open64)

#define OPENING_AT(name)                                                          \
    int name(int at, const char *path, int flags, ...) {                          \
        va_list rest;                                                             \
        va_start(rest, flags);                                                    \
        mode_t mode = va_arg(rest, mode_t);                                       \
        va_end(rest);                                                             \
        if (struck("open", path)) OUTCOME(REAL(name)(at, path, flags, mode));     \
        return REAL(name)(at, path, flags, mode);                                 \
    }
OPENING_AT(openat)
OPENING_AT(openat64)

ssize_t write(int descriptor, const void *data, size_t size) {
    if (struck_descriptor("write", descriptor)) {
        if (strcmp(action, "short") == 0) return REAL(write)(descriptor, data, (size + 1) / 2);
        /* Death in the middle of a write leaves a part of it. */
        OUTCOME(REAL(write)(descriptor, data, (size + 1) / 2));
    }
    return REAL(write)(descriptor, data, size);
}

int fsync(int descriptor) {
    if (struck_descriptor("fsync", descriptor)) OUTCOME(fcntl(descriptor, F_GETFD));
    return fcntl(descriptor, F_GETFD) < 0 ? -1 : 0;
}

int close(int descriptor) {
    /* Only of files written to: a network file system reports lost data there. */
    int flags = nth > 0 ? fcntl(descriptor, F_GETFL) : 0;
    if (flags > 0 && (flags & O_ACCMODE) != O_RDONLY && struck_descriptor("close", descriptor)) {
        REAL(close)(descriptor);
        OUTCOME(-1);
    }
    return REAL(close)(descriptor);
}

int link(const char *from, const char *to) {
    if (struck("link", to)) OUTCOME(REAL(link)(from, to));
    return REAL(link)(from, to);
}

int linkat(int at, const char *from, int at_to, const char *to, int flags) {
    if (struck("link", to)) OUTCOME(REAL(linkat)(at, from, at_to, to, flags));
    return REAL(linkat)(at, from, at_to, to, flags);
}

int rename(const char *from, const char *to) {
    if (struck("rename", to)) OUTCOME(REAL(rename)(from, to));
    return REAL(rename)(from, to);
}

int renameat(int at, const char *from, int at_to, const char *to) {
    if (struck("rename", to)) OUTCOME(REAL(renameat)(at, from, at_to, to));
    return REAL(renameat)(at, from, at_to, to);
}

int renameat2(int at, const char *from, int at_to, const char *to, unsigned flags) {
    if (struck("rename", to)) OUTCOME(REAL(renameat2)(at, from, at_to, to, flags));
    return REAL(renameat2)(at, from, at_to, to, flags);
}

int mkdir(const char *path, mode_t mode) {
    if (struck("mkdir", path)) OUTCOME(REAL(mkdir)(path, mode));
    return REAL(mkdir)(path, mode);
}

/* Checked for every lock, because a forked process may have been configured later. */
static int no_locks(void) { return getenv("TOKENMILL_NO_LOCKS") != NULL; }

int flock(int descriptor, int operation) {
    return no_locks() ? 0 : REAL(flock)(descriptor, operation);
}

int lockf(int descriptor, int command, off_t length) {
    return no_locks() ? 0 : REAL(lockf)(descriptor, command, length);
}

#define CONTROLLING(name)                                                                 \
    int name(int descriptor, int command, ...) {                                          \
        va_list rest;                                                                     \
        va_start(rest, command);                                                          \
        void *argument = va_arg(rest, void *);                                            \
        va_end(rest);                                                                     \
        if ((command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK ||       \
             command == F_OFD_SETLKW) && no_locks())                                      \
            return 0;                                                                     \
        return REAL(name)(descriptor, command, argument);                                 \
    }
CONTROLLING(fcntl)
CONTROLLING(fcntl64)
