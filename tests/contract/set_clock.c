/* Preloaded into a program: its wall clock is ahead by the seconds that the file "clock" in its
   current folder holds. Clocks that nothing sets, and sleeps, stay as they are. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static time_t ahead(void) {
  char text[32] = "";
  int before = errno, file = open("clock", O_RDONLY | O_CLOEXEC);
  if (file >= 0) {
    if (read(file, text, sizeof text - 1) < 0) text[0] = 0;
    close(file);
  }
  errno = before;
  return atol(text);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int result = syscall(SYS_clock_gettime, clock, now);
  if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += ahead();
  return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  int result = syscall(SYS_gettimeofday, now, zone);
  if (!result && now) now->tv_sec += ahead();
  return result;
}

time_t time(time_t *now) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (now) *now = found.tv_sec;
  return found.tv_sec;
}
