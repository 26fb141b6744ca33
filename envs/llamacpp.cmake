# llama.cpp without the library that its programs share, half of the compiling: no engine needs it. llama-cpp-python turns it
# on by force, but in CMake's cache, and a plain variable goes before that. CMake reads this after `project(llama_cpp)`.
set(LLAMA_BUILD_COMMON OFF)
