// Tensors that end where a page ends that nobody may touch, and that stay out of bounds once they are freed.
//
// Preloaded (LD_PRELOAD) in front of the C library's allocator. torch's CPU allocator takes its memory by
// `posix_memalign`; each of its blocks gets pages of its own here, and addresses that are never given out again:
//
//   | header | ....... block, rounded up to 64 bytes | no access |
//
// A read or write behind the block, or of a block that was freed, ends the process. The range of addresses that the
// lanes keep memory in is refused, so that their tensors come from here, too.

#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

extern void* __libc_memalign(size_t alignment, size_t size_bytes);
extern void* __libc_realloc(void* block, size_t size_bytes);
extern void __libc_free(void* block);

static const size_t kRange = (size_t)1 << 45, kPage = 4096, kSmallest = 512, kLargestMap = (size_t)1 << 37;

struct header {
  size_t num_pages, size_bytes;
};

static char* range;
static size_t used_bytes;

__attribute__((constructor)) static void reserve(void) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  char* made = (char*)syscall(SYS_mmap, NULL, kRange, PROT_NONE, flags, -1, 0);
  if (made == (char*)MAP_FAILED) abort();
  range = made;
}

static struct header* header_of(void* block) {
  return (struct header*)((uintptr_t)block / kPage * kPage - kPage);
}

static int is_guarded(void* block) { return range != NULL && (char*)block >= range && (char*)block < range + kRange; }

static void* take(size_t alignment, size_t size_bytes) {
  const size_t whole_bytes = (size_bytes + alignment - 1) / alignment * alignment;
  const size_t num_pages = (whole_bytes + kPage - 1) / kPage;
  const size_t at = __atomic_fetch_add(&used_bytes, (num_pages + 2) * kPage, __ATOMIC_SEQ_CST);
  if (at + (num_pages + 2) * kPage > kRange) return NULL;
  if (mprotect(range + at, (num_pages + 1) * kPage, PROT_READ | PROT_WRITE) != 0) return NULL;
  *(struct header*)(range + at) = (struct header){num_pages, size_bytes};
  return range + at + (num_pages + 1) * kPage - whole_bytes;
}

int posix_memalign(void** block, size_t alignment, size_t size_bytes) {
  const int guards = range != NULL && alignment <= kPage && size_bytes >= kSmallest;
  void* made = guards ? take(alignment, size_bytes) : __libc_memalign(alignment, size_bytes);
  if (made == NULL) return ENOMEM;
  *block = made;
  return 0;
}

void free(void* block) {
  if (!is_guarded(block)) {
    __libc_free(block);
    return;
  }
  struct header* header = header_of(block);
  const size_t size_bytes = (header->num_pages + 1) * kPage;
  madvise(header, size_bytes, MADV_DONTNEED);
  mprotect(header, size_bytes, PROT_NONE);
}

void* realloc(void* block, size_t size_bytes) {
  if (!is_guarded(block)) return __libc_realloc(block, size_bytes);
  void* made = malloc(size_bytes);
  if (made == NULL) return NULL;
  const size_t before_bytes = header_of(block)->size_bytes;
  memcpy(made, block, before_bytes < size_bytes ? before_bytes : size_bytes);
  free(block);
  return made;
}

void* mmap(void* address, size_t size_bytes, int access, int flags, int file, off_t offset) {
  if (size_bytes > kLargestMap) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  return (void*)syscall(SYS_mmap, address, size_bytes, access, flags, file, offset);
}

void* mmap64(void* address, size_t size_bytes, int access, int flags, int file, off_t offset) {
  return mmap(address, size_bytes, access, flags, file, offset);
}
