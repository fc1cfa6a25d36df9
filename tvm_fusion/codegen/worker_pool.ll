; SPDX-License-Identifier: Apache-2.0
;
; Threads that share the parallel loops of kernels: what TVM's code generator calls in place of its
; runtime's thread pool. It is LLVM's language because that is the only compiler that is surely
; there. runtime/thread_pool.py allocates a pool and starts its threads.
;
; A launch opens a task for each thread. The caller does the first; a thread claims its own, and so
; does the caller with those that nobody has begun when it is done with its own. So a kernel waits
; for a thread that computes, but never for one that the system does not let run.
;
; A thread without a task spins without giving its processor away. From time to time it looks whether
; the system took the processor from it, for other work, and then sleeps; as it does in the end.

target triple = "$triple"

; A task is open if its round is even, and claimed if it is odd.
;                   round, asleep, barriers, index, pool
%Task = type { i32, i32, i32, i32, ptr, [104 x i8] }
; What TVM hands to the function of a parallel loop: the pool, and the number of tasks.
%Group = type { ptr, i32 }
;                   pending, waits, failed,            round, spins, patience, looks
%Pool = type { i32, i32, i32, [13 x i32], i32, i32, i32, i32,
;              function, arguments, group, raise, threads
               ptr, ptr, %Group, ptr, i32, i32, [0 x %Task] }
; An argument or a result of a function that Python calls.
%Any = type { i32, i32, i64 }

; TVM's runtime sets these two to its own functions when it loads the library.
@__TVMBackendParallelLaunch = weak global ptr null
@__TVMBackendParallelBarrier = weak global ptr null

@tvm.launch = internal global ptr null
@tvm.barrier = internal global ptr null
@key = internal global i32 0
@kind = internal constant [13 x i8] c"RuntimeError\00"
@message = internal constant [48 x i8] c"a thread that shares a kernel's loop has failed\00"

declare i64 @syscall(i64, ...)
declare i32 @getrusage(i32, ptr)
declare ptr @pthread_getspecific(i32)

define internal void @pause() alwaysinline {
  call void asm sideeffect "$pause", "~{memory}"()
  ret void
}

define internal void @wait(ptr %word, i32 %value) noinline {
  %result = call i64 (i64, ...) @syscall(i64 $futex, ptr %word, i32 128, i32 %value, ptr null)
  ret void
}

define internal void @wake(ptr %word) noinline {
  %result = call i64 (i64, ...) @syscall(i64 $futex, ptr %word, i32 129, i32 1)
  ret void
}

define internal i1 @claim(ptr %task, i32 %round) alwaysinline {
  %claimed = or i32 %round, 1
  %found = cmpxchg ptr %task, i32 %round, i32 %claimed acq_rel acquire
  %won = extractvalue { i32, i1 } %found, 1
  ret i1 %won
}

define internal i32 @run(ptr %pool, i32 %index) noinline {
  %function.at = getelementptr %Pool, ptr %pool, i32 0, i32 8
  %function = load ptr, ptr %function.at
  %arguments.at = getelementptr %Pool, ptr %pool, i32 0, i32 9
  %arguments = load ptr, ptr %arguments.at
  %group = getelementptr %Pool, ptr %pool, i32 0, i32 10
  %status = call i32 %function(i32 %index, ptr %group, ptr %arguments)
  %is.right = icmp eq i32 %status, 0
  br i1 %is.right, label %done, label %wrong
wrong:
  %failed = getelementptr %Pool, ptr %pool, i32 0, i32 2
  store atomic i32 1, ptr %failed monotonic, align 4
  br label %done
done:
  ret i32 %status
}

; How often the system has taken the processor from this thread: the last field of "rusage".
define internal i64 @preemptions() noinline {
  %usage = alloca [18 x i64]
  %result = call i32 @getrusage(i32 1, ptr %usage)
  %count.at = getelementptr [18 x i64], ptr %usage, i32 0, i32 17
  %count = load i64, ptr %count.at
  ret i64 %count
}

; The life of a thread.
define internal ptr @work(ptr %task) {
entry:
  %asleep = getelementptr %Task, ptr %task, i32 0, i32 1
  %index.at = getelementptr %Task, ptr %task, i32 0, i32 3
  %index = load i32, ptr %index.at
  %pool.at = getelementptr %Task, ptr %task, i32 0, i32 4
  %pool = load ptr, ptr %pool.at
  %waits = getelementptr %Pool, ptr %pool, i32 0, i32 1
  %spins.at = getelementptr %Pool, ptr %pool, i32 0, i32 5
  %looks.at = getelementptr %Pool, ptr %pool, i32 0, i32 7
  %seen = alloca i64
  store i64 0, ptr %seen
  %caution = alloca i32
  store i32 0, ptr %caution
  br label %idle
idle:
  %looks = load i32, ptr %looks.at
  br label %spin
spin:
  %looks.left = phi i32 [ %looks, %idle ], [ %looks.fewer, %rested ]
  %spins = load i32, ptr %spins.at
  br label %look
look:
  %left = phi i32 [ %spins, %spin ], [ %fewer, %again ]
  %round = load atomic i32, ptr %task acquire, align 4
  %is.claimed = trunc i32 %round to i1
  br i1 %is.claimed, label %none, label %try
try:
  %won = call i1 @claim(ptr %task, i32 %round)
  br i1 %won, label %compute, label %idle
none:
  %is.tired = icmp eq i32 %left, 0
  br i1 %is.tired, label %rest, label %again
again:
  call void @pause()
  %fewer = sub i32 %left, 1
  br label %look
rest:
  %before = load i64, ptr %seen
  %preemptions = call i64 @preemptions()
  store i64 %preemptions, ptr %seen
  %is.alone = icmp eq i64 %before, %preemptions
  br i1 %is.alone, label %calm, label %disturbed
disturbed:
  store i32 100, ptr %caution
  br label %sleep
calm:
  %cautious = load i32, ptr %caution
  %is.calm = icmp eq i32 %cautious, 0
  br i1 %is.calm, label %rested, label %calmer
calmer:
  %less = sub i32 %cautious, 1
  store i32 %less, ptr %caution
  br label %sleep
rested:
  %looks.fewer = sub i32 %looks.left, 1
  %is.over = icmp eq i32 %looks.fewer, 0
  br i1 %is.over, label %sleep, label %spin
sleep: ; a launch opens the task and then reads whether the thread is asleep
  store atomic i32 1, ptr %asleep seq_cst, align 4
  %now = load atomic i32, ptr %task seq_cst, align 4
  %is.idle = trunc i32 %now to i1
  br i1 %is.idle, label %nap, label %wakes
nap:
  call void @wait(ptr %task, i32 %now)
  br label %wakes
wakes:
  store atomic i32 0, ptr %asleep monotonic, align 4
  br label %idle
compute:
  %status = call i32 @run(ptr %pool, i32 %index)
  %pending = atomicrmw sub ptr %pool, i32 1 seq_cst
  %is.last = icmp eq i32 %pending, 1
  br i1 %is.last, label %last, label %idle
last:
  %caller = load atomic i32, ptr %waits seq_cst, align 4
  %is.awake = icmp eq i32 %caller, 0
  br i1 %is.awake, label %idle, label %call
call:
  call void @wake(ptr %pool)
  br label %idle
}

; Until no more than some tasks are pending, or the caller has spun so often.
define internal i1 @spin_until(ptr %pool, i32 %most, i32 %spins) {
entry:
  br label %look
look:
  %left = phi i32 [ %spins, %entry ], [ %fewer, %again ]
  %pending = load atomic i32, ptr %pool acquire, align 4
  %is.done = icmp sle i32 %pending, %most
  br i1 %is.done, label %end, label %busy
busy:
  %is.tired = icmp eq i32 %left, 0
  br i1 %is.tired, label %end, label %again
again:
  call void @pause()
  %fewer = sub i32 %left, 1
  br label %look
end:
  ret i1 %is.done
}

define internal void @sleep_until_done(ptr %pool) {
  %waits = getelementptr %Pool, ptr %pool, i32 0, i32 1
  store atomic i32 1, ptr %waits seq_cst, align 4
  br label %look
look:
  %pending = load atomic i32, ptr %pool seq_cst, align 4
  %is.done = icmp eq i32 %pending, 0
  br i1 %is.done, label %end, label %sleep
sleep:
  call void @wait(ptr %pool, i32 %pending)
  br label %look
end:
  ret void
}

; Run a parallel loop on the pool of the calling thread, or on TVM's if it has none.
define internal i32 @launch(ptr %function, ptr %arguments, i32 %tasks) {
  %key = load i32, ptr @key
  %pool = call ptr @pthread_getspecific(i32 %key)
  %has.none = icmp eq ptr %pool, null
  br i1 %has.none, label %tvm, label %own
tvm:
  %tvm.launch = load ptr, ptr @tvm.launch
  %tvm.status = call i32 %tvm.launch(ptr %function, ptr %arguments, i32 %tasks)
  ret i32 %tvm.status
own:
  %status = call i32 @share(ptr %pool, ptr %function, ptr %arguments)
  ret i32 %status
}

; Each thread does its part of the loop: as many tasks as threads, whatever the caller asks for.
define internal i32 @share(ptr %pool, ptr %function, ptr %arguments) {
entry:
  %threads.at = getelementptr %Pool, ptr %pool, i32 0, i32 12
  %threads = load i32, ptr %threads.at
  %waits = getelementptr %Pool, ptr %pool, i32 0, i32 1
  %failed = getelementptr %Pool, ptr %pool, i32 0, i32 2
  %round.at = getelementptr %Pool, ptr %pool, i32 0, i32 4
  %spins.at = getelementptr %Pool, ptr %pool, i32 0, i32 5
  %patience.at = getelementptr %Pool, ptr %pool, i32 0, i32 6
  %function.at = getelementptr %Pool, ptr %pool, i32 0, i32 8
  %arguments.at = getelementptr %Pool, ptr %pool, i32 0, i32 9
  %tasks.at = getelementptr %Pool, ptr %pool, i32 0, i32 10, i32 1
  %before = load i32, ptr %round.at
  %round = add i32 %before, 2
  store i32 %round, ptr %round.at
  store ptr %function, ptr %function.at
  store ptr %arguments, ptr %arguments.at
  store i32 %threads, ptr %tasks.at
  store atomic i32 0, ptr %waits monotonic, align 4
  store atomic i32 %threads, ptr %pool monotonic, align 4
  br label %open
open:
  %i = phi i32 [ 1, %entry ], [ %i.next, %opened ]
  %is.open = icmp sge i32 %i, %threads
  br i1 %is.open, label %own, label %tell
tell:
  %task = getelementptr %Pool, ptr %pool, i32 0, i32 14, i32 %i
  store atomic i32 %round, ptr %task seq_cst, align 4
  %asleep.at = getelementptr %Task, ptr %task, i32 0, i32 1
  %asleep = load atomic i32, ptr %asleep.at seq_cst, align 4
  %is.awake = icmp eq i32 %asleep, 0
  br i1 %is.awake, label %opened, label %rouse
rouse:
  call void @wake(ptr %task)
  br label %opened
opened:
  %i.next = add i32 %i, 1
  br label %open
own:
  %status = call i32 @run(ptr %pool, i32 0)
  %patience = load i32, ptr %patience.at
  %are.done = call i1 @spin_until(ptr %pool, i32 1, i32 %patience)
  br i1 %are.done, label %end, label %help
help:
  %j = phi i32 [ 1, %own ], [ %j.next, %helped ]
  %is.helped = icmp sge i32 %j, %threads
  br i1 %is.helped, label %finish, label %offer
offer:
  %other = getelementptr %Pool, ptr %pool, i32 0, i32 14, i32 %j
  %won = call i1 @claim(ptr %other, i32 %round)
  br i1 %won, label %take, label %helped
take:
  %its.status = call i32 @run(ptr %pool, i32 %j)
  %its.pending = atomicrmw sub ptr %pool, i32 1 seq_cst
  br label %helped
helped:
  %j.next = add i32 %j, 1
  br label %help
finish:
  %own.pending = atomicrmw sub ptr %pool, i32 1 seq_cst
  %spins = load i32, ptr %spins.at
  %soon = call i1 @spin_until(ptr %pool, i32 0, i32 %spins)
  br i1 %soon, label %end, label %long
long:
  call void @sleep_until_done(ptr %pool)
  br label %end
end:
  %failure = load atomic i32, ptr %failed monotonic, align 4
  %is.right = icmp eq i32 %failure, 0
  br i1 %is.right, label %right, label %wrong
right:
  ret i32 0
wrong:
  call void @forget_failure(ptr %pool, i32 %threads, i32 %status)
  ret i32 -1
}

; After a failure the threads have passed different numbers of barriers. An error of the caller's
; own part is set already; that of another thread is known to that thread only.
define internal void @forget_failure(ptr %pool, i32 %threads, i32 %status) noinline {
entry:
  %failed = getelementptr %Pool, ptr %pool, i32 0, i32 2
  store atomic i32 0, ptr %failed monotonic, align 4
  br label %next
next:
  %i = phi i32 [ 0, %entry ], [ %i.next, %clear ]
  %is.clear = icmp sge i32 %i, %threads
  br i1 %is.clear, label %tell, label %clear
clear:
  %barriers = getelementptr %Pool, ptr %pool, i32 0, i32 14, i32 %i, i32 2
  store atomic i32 0, ptr %barriers monotonic, align 4
  %i.next = add i32 %i, 1
  br label %next
tell:
  %is.other = icmp eq i32 %status, 0
  br i1 %is.other, label %raise, label %end
raise:
  %raise.at = getelementptr %Pool, ptr %pool, i32 0, i32 11
  %function = load ptr, ptr %raise.at
  call void %function(ptr @kind, ptr @message)
  br label %end
end:
  ret void
}

; Wait until all threads have come here. A group of a pool lies in it; others are of TVM's threads.
define internal i32 @barrier(i32 %index, ptr %group) {
  %pool = load ptr, ptr %group
  %group.there = getelementptr %Pool, ptr %pool, i32 0, i32 10
  %is.there = icmp eq ptr %group, %group.there
  br i1 %is.there, label %own, label %tvm
tvm:
  %tvm.barrier = load ptr, ptr @tvm.barrier
  %tvm.status = call i32 %tvm.barrier(i32 %index, ptr %group)
  ret i32 %tvm.status
own:
  call void @meet(ptr %pool, i32 %index)
  ret i32 0
}

define internal void @meet(ptr %pool, i32 %index) {
entry:
  %threads.at = getelementptr %Pool, ptr %pool, i32 0, i32 12
  %tasks = load i32, ptr %threads.at
  %spins.at = getelementptr %Pool, ptr %pool, i32 0, i32 5
  %spins = load i32, ptr %spins.at
  %own = getelementptr %Pool, ptr %pool, i32 0, i32 14, i32 %index, i32 2
  %before = atomicrmw add ptr %own, i32 1 acq_rel
  br label %next
next:
  %i = phi i32 [ 0, %entry ], [ %i.next, %passed ]
  %is.done = icmp sge i32 %i, %tasks
  br i1 %is.done, label %end, label %other
other:
  %barriers = getelementptr %Pool, ptr %pool, i32 0, i32 14, i32 %i, i32 2
  br label %look
look:
  %left = phi i32 [ %spins, %other ], [ %fewer, %again ], [ 0, %yield ]
  %theirs = load atomic i32, ptr %barriers acquire, align 4
  %ahead = sub i32 %theirs, %before
  %is.there = icmp sgt i32 %ahead, 0
  br i1 %is.there, label %passed, label %busy
busy:
  %is.tired = icmp eq i32 %left, 0
  br i1 %is.tired, label %yield, label %again
again:
  call void @pause()
  %fewer = sub i32 %left, 1
  br label %look
yield:
  %result = call i64 (i64, ...) @syscall(i64 $sched_yield)
  br label %look
passed:
  %i.next = add i32 %i, 1
  br label %next
end:
  ret void
}

; Called from Python with a key: the kernels of this library run their loops on the pool that a thread
; has under it. Returns the address of the function that the threads of a pool run.
define i32 @__tvm_ffi_tvm_fusion_use_pools(ptr %self, ptr %arguments, i32 %count, ptr %result) {
entry:
  %key.at = getelementptr %Any, ptr %arguments, i32 0, i32 2
  %key = load i64, ptr %key.at
  %narrow = trunc i64 %key to i32
  store i32 %narrow, ptr @key
  ; TVM sets the functions again when the same file is loaded again.
  %tvm.launch = load ptr, ptr @__TVMBackendParallelLaunch
  %is.set = icmp eq ptr %tvm.launch, @launch
  br i1 %is.set, label %end, label %change
change:
  store ptr %tvm.launch, ptr @tvm.launch
  %tvm.barrier = load ptr, ptr @__TVMBackendParallelBarrier
  store ptr %tvm.barrier, ptr @tvm.barrier
  store ptr @barrier, ptr @__TVMBackendParallelBarrier
  store ptr @launch, ptr @__TVMBackendParallelLaunch
  br label %end
end:
  store i32 1, ptr %result
  %value = getelementptr %Any, ptr %result, i32 0, i32 2
  store ptr @work, ptr %value
  ret i32 0
}

!llvm.module.flags = !{!0, !1}
!0 = !{i32 2, !"tvm_target", !"$target"}
!1 = !{i32 7, !"PIC Level", i32 2}
