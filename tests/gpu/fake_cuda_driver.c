// SPDX-License-Identifier: Apache-2.0
// CUDA's driver and runtime for a GPU that computes nothing: device memory is the host's, and a
// launch only checks. Modules must be machine code for sm_90, kernels must be in them, grids,
// blocks and shared memory must be possible. The file FAKE_CUDA_REPORT gets a line a launch.
#include <elf.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK, INVALID_VALUE, OUT_OF_MEMORY, NO_BINARY = 209, NOT_FOUND = 500 };
enum { MACHINE_CUDA = 190, MOST_SHARED = 232448, MOST_ROWS = 65535, MOST_THREADS = 1024 };

typedef struct {
  const Elf64_Ehdr *image;
} Module;

typedef struct {
  char name[512];
  int shared;
} Function;

typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream, *attributes;
  unsigned attribute_count;
} LaunchConfig;

static int fail(int code, const char *reason, const char *what) {
  fprintf(stderr, "fake CUDA driver: %s: %s\n", reason, what);
  return code;
}

int cuDeviceGetName(char *name, int length, int device) {
  snprintf(name, length, "NVIDIA H100 Fake");
  return OK;
}

int cuGetErrorName(int code, const char **text) {
  *text = "FAKE_CUDA_ERROR";
  return OK;
}

int cuGetErrorString(int code, const char **text) {
  *text = "refused by the fake driver";
  return OK;
}

int cuModuleLoadData(Module **module, const void *image) {
  const Elf64_Ehdr *header = image;
  if (memcmp(header->e_ident, ELFMAG, SELFMAG) || header->e_machine != MACHINE_CUDA)
    return fail(NO_BINARY, "no machine code", "a module");
  *module = malloc(sizeof **module);
  (*module)->image = header;
  return OK;
}

int cuModuleUnload(Module *module) {
  free(module);
  return OK;
}

int cuModuleGetFunction(Function **function, Module *module, const char *name) {
  const char *image = (const char *)module->image;
  const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + module->image->e_shoff);
  const char *names = image + sections[module->image->e_shstrndx].sh_offset;
  for (int i = 0; i < module->image->e_shnum; i++) {
    const char *section = names + sections[i].sh_name;
    if (!strncmp(section, ".text.", 6) && !strcmp(section + 6, name)) {
      *function = calloc(1, sizeof **function);
      snprintf((*function)->name, sizeof (*function)->name, "%s", name);
      return OK;
    }
  }
  return fail(NOT_FOUND, "no such kernel", name);
}

int cuFuncSetAttribute(Function *function, int attribute, int value) {
  if (value > MOST_SHARED) return fail(INVALID_VALUE, "too much shared memory", function->name);
  function->shared = value;
  return OK;
}

int cuLaunchKernelEx(const LaunchConfig *config, Function *function, void **arguments, void **extra) {
  unsigned threads = config->block[0] * config->block[1] * config->block[2];
  if (!config->grid[0] || !config->grid[1] || !config->grid[2] || config->grid[1] > MOST_ROWS ||
      config->grid[2] > MOST_ROWS)
    return fail(INVALID_VALUE, "impossible grid", function->name);
  if (!threads || threads > MOST_THREADS) return fail(INVALID_VALUE, "impossible block", function->name);
  if (config->shared > 49152 && config->shared > (unsigned)function->shared)
    return fail(INVALID_VALUE, "shared memory that was not asked for", function->name);
  const char *path = getenv("FAKE_CUDA_REPORT");
  FILE *report = path ? fopen(path, "a") : NULL;
  if (report) {
    fprintf(report, "%s %u\n", function->name, threads);
    fclose(report);
  }
  return OK;
}

/* What the manual says of a map with a swizzle of 128 bytes or without one, of elements of 16 or 64 bits. */
int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *data, const unsigned long long *sizes,
                           const unsigned long long *strides, const unsigned *box, const unsigned *steps,
                           int interleave, int swizzle, int promotion, int fill) {
  if ((unsigned long long)map % 64 || (unsigned long long)data % 16 || rank < 1 || rank > 5)
    return fail(INVALID_VALUE, "impossible map", "");
  for (unsigned k = 0; k < rank; ++k)
    if (!sizes[k] || sizes[k] > 1ull << 32 || !box[k] || box[k] > 256 || !steps[k] || steps[k] > 8 ||
        (k ? strides[k - 1] % 16 != 0 : steps[k] != 1))
      return fail(INVALID_VALUE, "impossible axis of a map", "");
  unsigned line = box[0] * (type == 4 ? 8 : 2);
  if (interleave || line % 16 || (swizzle && (swizzle != 3 || line > 128)))
    return fail(INVALID_VALUE, "impossible box of a map", "");
  return OK;
}

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case 1: *value = MOST_THREADS; break;   // threads of a block
    case 2: case 3: *value = 1024; break;   // x and y of a block
    case 4: *value = 64; break;             // z of a block
    case 8: *value = 49152; break;          // shared memory of a block
    case 10: *value = 32; break;            // lanes of a warp
    case 12: *value = 65536; break;         // registers of a block
    case 13: *value = 1980000; break;       // clock in kHz
    case 16: *value = 132; break;           // multiprocessors
    case 38: *value = 50 << 20; break;      // second-level cache
    case 75: *value = 9; break;             // compute capability
    case 76: *value = 0; break;
    case 97: *value = MOST_SHARED; break;   // shared memory of a block that asks for it
    default: *value = 1;
  }
  return OK;
}

int cudaGetDeviceProperties(void *properties, int device) {
  strcpy(properties, "NVIDIA H100 Fake");
  return OK;
}

int cudaMalloc(void **memory, size_t size) {
  return posix_memalign(memory, 512, size ? size : 1) ? OUT_OF_MEMORY : OK;
}

int cudaMallocHost(void **memory, size_t size) { return cudaMalloc(memory, size); }

int cudaFree(void *memory) {
  free(memory);
  return OK;
}

int cudaFreeHost(void *memory) { return cudaFree(memory); }

int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
  memcpy(to, from, size);
  return OK;
}

int cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t size, void *stream) {
  memcpy(to, from, size);
  return OK;
}

int cudaMemGetInfo(size_t *left, size_t *all) {
  *left = *all = (size_t)80 << 30;
  return OK;
}

int cudaEventElapsedTime(float *milliseconds, void *start, void *end) {
  *milliseconds = 0.01f;
  return OK;
}

int cudaGetDeviceCount(int *count) { return *count = 1, OK; }
int cudaGetDevice(int *device) { return *device = 0, OK; }
const char *cudaGetErrorName(int code) { return "FAKE_CUDA_ERROR"; }
const char *cudaGetErrorString(int code) { return "refused by the fake driver"; }

// Handles are tokens that nothing looks into.
#define HANDLE(name, ...) \
  int name(void **handle, ##__VA_ARGS__) { return *handle = (void *)1, OK; }
HANDLE(cudaEventCreate)
HANDLE(cudaStreamCreate)
HANDLE(cudaStreamCreateWithFlags, unsigned flags)
HANDLE(cudaGraphInstantiate, void *graph, unsigned long long flags)

#define NOTHING(name) \
  int name(void) { return OK; }
NOTHING(cudaSetDevice)
NOTHING(cudaGetLastError)
NOTHING(cudaPeekAtLastError)
NOTHING(cudaEventDestroy)
NOTHING(cudaEventRecord)
NOTHING(cudaEventSynchronize)
NOTHING(cudaGraphDestroy)
NOTHING(cudaGraphExecDestroy)
NOTHING(cudaGraphLaunch)
NOTHING(cudaStreamBeginCapture)
NOTHING(cudaStreamDestroy)
NOTHING(cudaStreamSynchronize)
NOTHING(cudaStreamWaitEvent)

int cudaStreamEndCapture(void *stream, void **graph) { return *graph = (void *)1, OK; }
