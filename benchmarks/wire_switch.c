// A switch with slow links between network namespaces, for wire.py on kernels without netem.
//
//     wire_switch RATE DELAY PID...      bits per second, microseconds, a process of each host
//
// Each host gets an Ethernet device eth0; number N has the hardware address 02:00:00:00:00:N. Every
// link has the rate in both directions, and a frame takes the delay from one host to another. A
// sender with 0.5 ms of frames ahead has to wait, as with a network card. No frame is lost.
// Frames that the kernel has not cut into packets yet (GSO) stay whole, and count with the headers
// that their packets will have. When the devices are there, it prints a line. It ends with its
// standard input.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define MOST_HOSTS 16
#define LARGEST (sizeof(struct virtio_net_hdr) + 65536 + 64)
#define AHEAD 500000   // ns
#define HEADERS 66     // of each packet after the first: Ethernet, IPv4, TCP with timestamps

typedef struct Frame {
  struct Frame *next;
  int64_t due;
  ssize_t length;
  unsigned char bytes[LARGEST];
} Frame;

typedef struct {
  int device;
  int64_t sent_by, received_by; // when the link has carried all frames of its direction
  Frame *first, *last;          // on their way to this host
} Host;

static Host hosts[MOST_HOSTS + 1];
static int count;
static double nanoseconds_per_byte;
static int64_t delay;
static Frame *unused;

static int64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void fail(const char *what) {
  perror(what);
  exit(1);
}

static int plug_in(const char *pid) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%s/ns/net", pid);
  int namespace = open(path, O_RDONLY);
  if (namespace < 0 || setns(namespace, CLONE_NEWNET) < 0) fail(path);
  close(namespace);
  int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
  if (device < 0) fail("/dev/net/tun");
  struct ifreq request = {.ifr_name = "eth0", .ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
  if (ioctl(device, TUNSETIFF, &request) < 0) fail("TUNSETIFF");
  if (ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4) < 0) fail("TUNSETOFFLOAD");
  return device;
}

static Frame *take(void) {
  Frame *frame = unused ? unused : malloc(sizeof *frame);
  if (!frame) fail("malloc");
  if (frame == unused) unused = frame->next;
  return frame;
}

static void give(Frame *frame) {
  frame->next = unused;
  unused = frame;
}

static void enqueue(Host *to, Frame *frame, int64_t departure, int64_t on_link) {
  int64_t arrival = departure + delay;
  if (arrival < to->received_by + on_link) arrival = to->received_by + on_link;
  frame->due = to->received_by = arrival;
  frame->next = NULL;
  if (to->last) to->last->next = frame;
  else to->first = frame;
  to->last = frame;
}

static void forward(Host *from, Frame *frame) {
  const struct virtio_net_hdr *offload = (const void *)frame->bytes;
  const unsigned char *ethernet = frame->bytes + sizeof *offload;
  int64_t wire = frame->length - (int64_t)sizeof *offload;
  if (offload->gso_type != VIRTIO_NET_HDR_GSO_NONE && offload->gso_size)
    wire += (wire - HEADERS - 1) / offload->gso_size * HEADERS;
  int64_t on_link = wire * nanoseconds_per_byte, time = now();
  if (from->sent_by < time) from->sent_by = time;
  from->sent_by += on_link;
  if (!(ethernet[0] & 1) && ethernet[5] >= 1 && ethernet[5] <= count) {
    enqueue(&hosts[ethernet[5]], frame, from->sent_by, on_link);
    return;
  }
  for (int i = 1; i <= count && ethernet[0] & 1; i++) { // to all: ARP
    if (&hosts[i] == from) continue;
    Frame *copy = take();
    memcpy(copy->bytes, frame->bytes, frame->length);
    copy->length = frame->length;
    enqueue(&hosts[i], copy, from->sent_by, on_link);
  }
  give(frame);
}

static int64_t deliver(int64_t time) { // returns when the next frame is due
  int64_t next = time + 1000000000;
  for (int i = 1; i <= count; i++) {
    Host *host = &hosts[i];
    while (host->first && host->first->due <= time) {
      Frame *frame = host->first;
      if (write(host->device, frame->bytes, frame->length) < 0 && errno == EAGAIN) break;
      host->first = frame->next;
      if (!host->first) host->last = NULL;
      give(frame);
    }
    if (host->first && host->first->due < next) next = host->first->due;
  }
  return next;
}

int main(int argc, char **argv) {
  count = argc - 3;
  if (count < 2 || count > MOST_HOSTS) return fprintf(stderr, "RATE DELAY PID PID...\n"), 2;
  nanoseconds_per_byte = 8e9 / atof(argv[1]);
  delay = atof(argv[2]) * 1000;
  for (int i = 1; i <= count; i++) hosts[i].device = plug_in(argv[i + 2]);
  struct sched_param priority = {.sched_priority = 1}; // a switch does not wait for ranks
  sched_setscheduler(0, SCHED_FIFO, &priority);
  prctl(PR_SET_TIMERSLACK, 1);
  puts("ready");
  fflush(stdout);
  struct pollfd polled[MOST_HOSTS + 1];
  for (;;) {
    int64_t time = now(), next = deliver(time);
    polled[0] = (struct pollfd){.fd = 0, .events = POLLIN};
    for (int i = 1; i <= count; i++) {
      int64_t ready = hosts[i].sent_by - AHEAD;
      polled[i] = (struct pollfd){.fd = ready <= time ? hosts[i].device : -1, .events = POLLIN};
      if (ready > time && ready < next) next = ready;
    }
    time = now();
    int64_t wait = next > time ? next - time : 0;
    struct timespec timeout = {wait / 1000000000, wait % 1000000000};
    if (ppoll(polled, count + 1, &timeout, NULL) < 0 && errno != EINTR) fail("ppoll");
    if (polled[0].revents) return 0;
    for (int i = 1; i <= count; i++) {
      if (!(polled[i].revents & POLLIN)) continue;
      for (int frames = 0; frames < 16 && hosts[i].sent_by - AHEAD <= now(); frames++) {
        Frame *frame = take();
        frame->length = read(hosts[i].device, frame->bytes, LARGEST);
        if (frame->length <= (ssize_t)sizeof(struct virtio_net_hdr)) {
          give(frame);
          break;
        }
        forward(&hosts[i], frame);
      }
    }
  }
}
