/* Runs a kernel of a matmul that TVM compiled for this processor, whatever runs this program.

   run ROWS K N BYTES CODE CODE < operands > result: bytes of an element of x and w, and DLPack's
   codes of the types of operands and results. */
#include <dlpack/dlpack.h>
#include <stdio.h>
#include <stdlib.h>
#include <tvm/ffi/c_api.h>

typedef struct { void* handle; int32_t tasks; } Group;
typedef int (*Lambda)(int, Group*, void*);

int __tvm_ffi_main(void*, const TVMFFIAny*, int32_t, TVMFFIAny*);

static int launch(Lambda each, void* data, int tasks) {
  Group alone = {NULL, 1};
  (void)tasks;
  return each(0, &alone, data);
}

static void* allocate(int device, int number, uint64_t bytes, int code, int bits) {
  (void)device, (void)number, (void)code, (void)bits;
  return aligned_alloc(64, (bytes + 63) / 64 * 64);
}

static int release(int device, int number, void* memory) {
  (void)device, (void)number;
  free(memory);
  return 0;
}

int (*__TVMBackendParallelLaunch)(Lambda, void*, int) = launch;
void* (*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int) = allocate;
int (*__TVMBackendFreeWorkspace)(int, int, void*) = release;

void TVMFFIErrorSetRaisedFromCStrParts(const char* kind, const char** parts, int32_t count) {
  fputs(kind, stderr);
  for (int32_t i = 0; i < count; ++i) fputs(parts[i], stderr);
}

int main(int count, char** words) {
  int64_t numbers[6];
  if (count != 7) return 3;
  for (int i = 0; i < 6; ++i) numbers[i] = atoll(words[i + 1]);
  const int64_t rows = numbers[0], k = numbers[1], n = numbers[2];
  int64_t shapes[3][2] = {{rows, k}, {n, k}, {rows, n}}, strides[3][2];
  DLTensor tensors[3];
  TVMFFIAny given[3] = {0}, result = {0};
  for (int i = 0; i < 3; ++i) {
    const int64_t bytes = i < 2 ? numbers[3] : 4;
    const size_t size = (size_t)(shapes[i][0] * shapes[i][1] * bytes);
    void* data = allocate(0, 0, size, 0, 0);
    if (i < 2 && fread(data, 1, size, stdin) != size) return 2;
    DLDataType dtype = {(uint8_t)numbers[i < 2 ? 4 : 5], (uint8_t)(8 * bytes), 1};
    DLDevice device = {kDLCPU, 0};
    strides[i][0] = shapes[i][1], strides[i][1] = 1;
    DLTensor tensor = {data, device, 2, dtype, shapes[i], strides[i], 0};
    tensors[i] = tensor;
    given[i].type_index = kTVMFFIDLTensorPtr;
    given[i].v_ptr = &tensors[i];
  }
  if (__tvm_ffi_main(NULL, given, 3, &result) != 0) return 1;
  fwrite(tensors[2].data, 4, (size_t)(rows * n), stdout);
  return 0;
}
