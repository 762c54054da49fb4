// Switches stacks: what a fiber needs, without the system calls that swapcontext makes for signal masks.
//
//   make_context(stack, bytes, entry)  returns the stack pointer of a fiber that begins at `entry`, which must not return
//   switch_context(&save, load)        keeps the running stack pointer in `save` and goes on at `load`
//
// For x86-64 and AArch64 (System V calling conventions); elsewhere, and with CUDA_ON_CPU_UCONTEXT, by ucontext.
#pragma once

#include <cstddef>
#include <cstdint>

#if !defined(CUDA_ON_CPU_UCONTEXT) && defined(__x86_64__) && defined(__ELF__)

// The callee-saved registers, and nothing else: the caller of a function expects no more to survive.
__asm__(
    ".text\n"
    ".p2align 4\n"
    ".type cuda_on_cpu_switch, @function\n"
    "cuda_on_cpu_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n"
    ".size cuda_on_cpu_switch, . - cuda_on_cpu_switch\n");

inline void* make_context(void* stack, size_t bytes, void (*entry)()) {
    const uintptr_t top = (reinterpret_cast<uintptr_t>(stack) + bytes) & ~uintptr_t{15};
    // Six registers, the entry that `ret` goes to, and a return address that is never used: on entry the stack is then as
    // misaligned as a call would leave it.
    uintptr_t* frame = reinterpret_cast<uintptr_t*>(top) - 8;
    for (int at = 0; at < 8; at++) frame[at] = 0;
    frame[6] = reinterpret_cast<uintptr_t>(entry);
    return frame;
}

extern "C" void cuda_on_cpu_switch(void** save, void* load);
inline void switch_context(void** save, void* load) { cuda_on_cpu_switch(save, load); }

#elif !defined(CUDA_ON_CPU_UCONTEXT) && defined(__aarch64__) && defined(__ELF__)

__asm__(
    ".text\n"
    ".p2align 4\n"
    ".type cuda_on_cpu_switch, %function\n"
    "cuda_on_cpu_switch:\n"
    "  stp x19, x20, [sp, #-160]!\n"
    "  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n"
    "  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n"
    "  str x9, [x0]\n"
    "  mov sp, x1\n"
    "  ldp d14, d15, [sp, #144]\n  ldp d12, d13, [sp, #128]\n  ldp d10, d11, [sp, #112]\n  ldp d8, d9, [sp, #96]\n"
    "  ldp x29, x30, [sp, #80]\n"
    "  ldp x27, x28, [sp, #64]\n  ldp x25, x26, [sp, #48]\n  ldp x23, x24, [sp, #32]\n  ldp x21, x22, [sp, #16]\n"
    "  ldp x19, x20, [sp], #160\n"
    "  ret\n"
    ".size cuda_on_cpu_switch, . - cuda_on_cpu_switch\n");

inline void* make_context(void* stack, size_t bytes, void (*entry)()) {
    const uintptr_t top = (reinterpret_cast<uintptr_t>(stack) + bytes) & ~uintptr_t{15};
    uintptr_t* frame = reinterpret_cast<uintptr_t*>(top) - 20;
    for (int at = 0; at < 20; at++) frame[at] = 0;
    frame[11] = reinterpret_cast<uintptr_t>(entry);  // x30, which `ret` goes to
    return frame;
}

extern "C" void cuda_on_cpu_switch(void** save, void* load);
inline void switch_context(void** save, void* load) { cuda_on_cpu_switch(save, load); }

#else

#include <ucontext.h>

#include <cstdlib>

// The "stack pointer" is the address of a ucontext_t; a fiber's lies at the low end of its stack.
inline void* make_context(void* stack, size_t bytes, void (*entry)()) {
    ucontext_t* context = static_cast<ucontext_t*>(stack);
    getcontext(context);
    const size_t head = (sizeof(ucontext_t) + 63) & ~size_t{63};
    context->uc_stack.ss_sp = static_cast<char*>(stack) + head;
    context->uc_stack.ss_size = bytes - head;
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
    return context;
}

inline void switch_context(void** save, void* load) {
    // On the stack that is left, where it stays until that stack goes on.
    ucontext_t here;
    *save = &here;
    swapcontext(&here, static_cast<ucontext_t*>(load));
}

#endif
