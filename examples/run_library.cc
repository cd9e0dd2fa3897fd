// Runs a function of a compiled library: no Python, only TVM's runtime.
//
//   run_library LIB FUNCTION cpu|cuda OUT [DTYPE SHAPE FILE]...
//
// such as `run_library lib.so main cpu y.bin float32 2x64 x.bin`.  A FILE holds the bytes of an array
// in C order.  The first result goes to OUT, its dtype and shape to the standard output.
//
// To build it, with the headers and libraries of TVM's wheels:
//
//   T=$(python -c "import tvm, os; print(os.path.dirname(tvm.__file__))"); F=$T/../tvm_ffi
//   g++ -std=c++17 -O2 -I$F/include run_library.cc -o run_library
//       -L$T/lib -L$F/lib -ltvm_runtime -ltvm_ffi -ldl -Wl,-rpath,$T/lib:$F/lib
#include <dlfcn.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/extra/module.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

using tvm::ffi::Any;
using tvm::ffi::Function;
using tvm::ffi::Module;
using tvm::ffi::Tensor;

// A function that TVM's runtime registers by name.
Function Registered(const char* name) { return Function::GetGlobalRequired(name); }

// Makes an array of "2x64" elements on `device` from the bytes of a file.
Tensor ReadArray(const char* dtype, const char* shape, const char* file, DLDevice device) {
  std::vector<int64_t> sizes;
  std::istringstream text(shape);
  for (std::string size; std::getline(text, size, 'x');) sizes.push_back(std::stoll(size));
  Tensor array = Registered("runtime.TVMTensorAllocWithScope")(
                     tvm::ffi::Shape(sizes), tvm::ffi::StringToDLDataType(dtype), device, nullptr)
                     .cast<Tensor>();
  std::ifstream stream(file, std::ios::binary);
  std::vector<char> bytes{std::istreambuf_iterator<char>(stream), {}};
  // It refuses another number of bytes.
  Registered("runtime.TVMTensorCopyFromBytes")(array, static_cast<void*>(bytes.data()), bytes.size());
  return array;
}

void WriteArray(const Tensor& array, const char* file) {
  std::vector<char> bytes(tvm::ffi::GetDataSize(array));
  Registered("runtime.TVMTensorCopyToBytes")(array, static_cast<void*>(bytes.data()), bytes.size());
  std::ofstream(file, std::ios::binary).write(bytes.data(), bytes.size());
  std::cout << tvm::ffi::DLDataTypeToString(array.dtype());
  for (int64_t size : array.shape()) std::cout << ' ' << size;
  std::cout << std::endl;
}

int Run(int argc, char** argv) {
  const bool cuda = argv[3] == std::string("cuda");
  // What TVM's runtime knows of CUDA is a library of its own, which nothing refers to by name.
  if (cuda && dlopen("libtvm_runtime_cuda.so", RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    std::cerr << dlerror() << std::endl;
    return 1;
  }
  const DLDevice device{cuda ? kDLCUDA : kDLCPU, 0};
  Module library = Module::LoadFromFile(argv[1]);
  Module machine = library->GetFunction("vm_load_executable").value()().cast<Module>();

  // Devices of the virtual machine: type, number, allocator (2: a pool).  Shapes are computed on the
  // CPU, so that is always the last.
  const int pool = 2;
  Function initialise = machine->GetFunction("vm_initialization").value();
  if (cuda) {
    initialise(int(kDLCUDA), 0, pool, int(kDLCPU), 0, pool);
  } else {
    initialise(int(kDLCPU), 0, pool);
  }

  std::vector<Any> arrays;
  for (int i = 5; i + 2 < argc; i += 3) {
    arrays.push_back(ReadArray(argv[i], argv[i + 1], argv[i + 2], device));
  }
  std::vector<tvm::ffi::AnyView> args(arrays.begin(), arrays.end());
  Any result;
  machine->GetFunction(argv[2]).value().CallPacked(args.data(), args.size(), &result);
  if (auto several = result.as<tvm::ffi::Array<Any>>()) result = several.value()[0];
  WriteArray(result.cast<Tensor>(), argv[4]);
  return 0;
}

int main(int argc, char** argv) {
  if (argc < 5 || (argc - 5) % 3 != 0) {
    std::cerr << "usage: run_library LIB FUNCTION cpu|cuda OUT [DTYPE SHAPE FILE]..." << std::endl;
    return 2;
  }
  try {
    return Run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
