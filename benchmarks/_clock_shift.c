/* Shifts the wall clock of a process by the nanoseconds that the file named by KVATLAS_SOAK_CLOCK holds now.
   Preloaded, so that a step of the host's clock is tried without setting the host's clock. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *shift;
static int (*real_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    real_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    const char *path = getenv("KVATLAS_SOAK_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(NULL, sizeof *shift, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (page != MAP_FAILED) shift = page;
}

int clock_gettime(clockid_t id, struct timespec *at) {
    if (!real_gettime) begin(); /* another library's constructor was quicker */
    int status = real_gettime(id, at);
    if (status || !shift || (id != CLOCK_REALTIME && id != CLOCK_REALTIME_COARSE)) return status;
    int64_t nanoseconds = at->tv_nsec + *shift % 1000000000;
    at->tv_sec += *shift / 1000000000;
    if (nanoseconds < 0) at->tv_sec--, nanoseconds += 1000000000;
    if (nanoseconds >= 1000000000) at->tv_sec++, nanoseconds -= 1000000000;
    at->tv_nsec = nanoseconds;
    return 0;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *kept) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (kept) *kept = now.tv_sec;
    return now.tv_sec;
}
