#!/bin/sh
# Measure again the results in data/h200, and in data/h100 (calibrate_x1, engine_8b_x1, engine_70b_half_x1; those of two
# GPUs have fewer algorithms and layouts than x2, fused_x2, engine_8b_x2): sh research/measure.sh FOLDER PART..., from
# the root of the repository, with the package installed or PYTHONPATH=src.
# Results and printed output go to FOLDER; a line reports how each command ended, and tests and scripts show their output
# as it comes. A part ends within ten minutes on GPUs, and its last number says how many it takes. README.md lists the
# parts of four and eight GPUs in the order to run them.
set -u
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 PYTHONUNBUFFERED=1
cpu="faults_cpu fuzz hosts operations_cpu overlap_hosts frameworks_cpu process_group_cpu served_trace"
one="calibrate_x1 engine_8b_x1 engine_70b_x1 engine_70b_half_x1 engine_405b_x1 profile_x1 sanitizer_memcheck sanitizer_racecheck products_x1 tests_products"
two="shared_calls_x2 nccl_memory_x2 tests_progress_x2 programs_x2 sm_wires_x2 calibrate_x2 x2 fast_x2 slices_x2 fused_x2 operations_x2 reductions_x2 tune_x2 tune_sms_x2 launches_x2 peers_x2 few_sms_x2 few_sms_launches_x2 headers_x2
    engine_8b_x2 engine_70b_x2 engine_70b_half engine_405b_half prefill_x2 training_x2 frameworks_x2 generation_x2 process_group_x2
    nvrar_2x1 overlap_all_reduce_x2 overlap_reduce_scatter_x2 overlap_all_gather_x2 overlap_all_to_all_x2
    overlap_bound_x2 overlap_scattered_x2 overlap_gathered_x2 overlap_published_x2 stress_x2 faults torch_suite_x2
    tests_cuda_x2 tests_fused_x2 tests_vendor_x2 tests_operations_x2 tests_compile_x2 tests_few_sms_x2 tests_stores_2x1 tests_puts_2x1
    tests_engine_x2 tests_engine_nodes_x2 tests_overlap tests_prefill_overlap tests_process_group_x2
    tests_frameworks tests_integrations vllm_x2 vllm_turns_x2"
four="x4 fast_x4 slices_x4 fused_x4 operations_x4 reductions_x4 tune_x4 tune_sms_x4 launches_x4 peers_x4 few_sms_x4 few_sms_launches_x4 headers_x4
    engine_8b engine_70b engine_405b engine_8b_x4 engine_70b_x4 engine_405b_4x1 engine_405b_2x2 engine_405b_1x4
    prefill_x4 training_x4 frameworks_x4 generation_x4 process_group_x4 nvrar_2x2 nvrar_4x1 nodes_engine_x4
    overlap_all_reduce_x4 overlap_reduce_scatter_x4 overlap_all_gather_x4 overlap_all_to_all_x4
    overlap_bound_x4 overlap_scattered_x4 overlap_gathered_x4 overlap_published_x4 stress_x4 faults_own_x4 faults_vendor_x4
    torch_suite_x4 tests_cuda_x4 tests_fused_x4 tests_vendor_x4 tests_operations_x4 tests_compile_x4 tests_few_sms_x4 tests_stores_2x2
    tests_stores_4x1 tests_puts_2x2 tests_puts_4x1 tests_engine_x4 tests_engine_nodes_x4
    tests_process_group_x4"
eight="x8 x5 x6 x7 fast_x8 slices_x8 fused_x8 operations_x8 tune_x8 launches_x8 peers_x8 engine_8b_x8 engine_70b_x8 engine_405b_8x1 engine_405b_4x2
    engine_405b_2x4 engine_405b_1x8 nvrar_2x4 nvrar_4x2 stress_x8 tests_cuda_x8 tests_fused_x8 tests_operations_x8 tests_compile_x8
    tests_few_sms_x8 tests_stores_4x2 tests_puts_4x2"
parts=$(echo $cpu $one $two $four $eight)
[ $# -ge 2 ] || { echo "usage: sh $0 FOLDER PART...; parts: $parts" >&2; exit 2; }
out=$1
shift
mkdir -p "$out"
start=$(date +%s)
if ! python3 -c "import importlib.metadata as m; m.version('shotcast')" 2>/dev/null; then # PyTorch finds backends by it
    found=$out/site/shotcast-0.0.dist-info
    mkdir -p "$found"
    printf 'Metadata-Version: 2.1\nName: shotcast\nVersion: 0.0\n' >"$found/METADATA"
    printf '[torch.backends]\nshotcast = shotcast.process_group.registration:register\n' >"$found/entry_points.txt"
    export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$out/site"
fi

ran() { echo "$1: code $2, $(($(date +%s) - start)) s"; }

# seconds, name, arguments of `shotcast bench`
bench() {
    limit=$1 name=$2
    shift 2
    timeout -k 5 "$limit" python3 -m shotcast bench "$@" --json "$out/$name.json" >"$out/$name.txt" 2>&1
    ran "$name" $?
}

# seconds, name, arguments of research/bench_modes.py
modes() {
    limit=$1 name=$2
    shift 2
    timeout -k 5 "$limit" python3 research/bench_modes.py "$@" --json "$out/$name.json" >"$out/$name.txt" 2>&1
    ran "$name" $?
}

# seconds, name, arguments of `shotcast tune`
tune() {
    limit=$1 name=$2
    shift 2
    timeout -k 5 "$limit" python3 -m shotcast tune "$@" --mode graph -f 4 -o "$out/$name.json" --merge >>"$out/$name.txt" 2>&1
    ran "$name" $?
}

# seconds, name, model, layouts, batches, algorithms and more
engine() {
    limit=$1 name=$2 model=$3 layouts=$4 batches=$5
    shift 5
    bench "$limit" "$name" engine "random:llama-3.1-$model" --device cuda --prompt 512 --output 128 --rounds 1 \
        --layouts "$layouts" --batches "$batches" --algorithms "$@"
}

# seconds, name, arguments of research/bench_overlap.py on the GPUs of the part; $sets names its forms
overlap() {
    limit=$1 name=overlap_$2_x$ranks
    shift 2
    timeout -k 5 "$limit" python3 research/bench_overlap.py --sets "${sets:-own,library,torch}" --device cuda \
        --world-size "$ranks" --timeout $((limit - 10)) "$@" --json "$out/$name.json" >"$out/$name.txt" 2>&1
    ran "$name" $?
}

# a file, a command: the command's output goes to the file, and is shown as it comes
shown() {
    file=$1
    shift
    { "$@" 2>&1; echo $? >"$file.code"; } | tee "$file"
    code=$(cat "$file.code")
    rm "$file.code"
    return "$code"
}

# seconds, name, tests; each is named as it begins
tests() {
    limit=$1 name=$2
    shift 2
    shown "$out/$name.txt" timeout -k 5 "$limit" python3 -m pytest -v -m gpu -p no:cacheprovider --junit-xml "$out/$name.xml" "$@"
    ran "$name" $?
}

# seconds, name, arguments of a script of this folder
script() {
    limit=$1 name=$2
    shift 2
    shown "$out/$name.txt" timeout -k 5 "$limit" python3 "$@"
    ran "$name" $?
}

# seconds, name, options of `research/bench_hosts.py collective`
on_hosts() {
    limit=$1 name=$2
    shift 2
    script "$limit" "$name" research/bench_hosts.py collective --json "$out/$name.json" "$@"
}

# 1 where there are fewer GPUs than ranks, which then take turns
shared() { [ "$(nvidia-smi -L 2>/dev/null | grep -c "^GPU")" -lt "$1" ] && echo 1; }

plain=tests/collectives/test_cuda.py
fused=tests/collectives/test_cuda_fused.py
for part in "$@"; do
    ranks=${part##*x} # of parts whose names end in a number of GPUs
    case $part in
    x[248])
        bench 200 "all_reduce_bf16_x$ranks" all-reduce -b 1K -e 256M -f 2 --seconds 0.05 --world-size "$ranks"
        more="one_shot,two_shot,ring,auto,nccl"
        bench 90 "all_reduce_f16_x$ranks" all-reduce -b 1K -e 256M -f 4 -d float16 --seconds 0.04 \
            --world-size "$ranks" --algorithms $more
        bench 90 "all_reduce_f32_x$ranks" all-reduce -b 1K -e 256M -f 4 -d float32 --seconds 0.04 \
            --world-size "$ranks" --algorithms $more
        modes 90 "between_bf16_x$ranks" all-reduce --between gemm -b 16K -e 1M -f 8 --seconds 0.1 --world-size "$ranks" \
            --algorithms auto,nccl
        ;;
    x[567]) # numbers of ranks that have no packaged table
        bench 300 "all_reduce_bf16_x$ranks" all-reduce -b 1K -e 256M -f 2 --seconds 0.05 --world-size "$ranks"
        ;;
    fast_x[248]) # NCCL on memory registered with it, then the host time of eager calls
        modes 150 "all_reduce_symmetric_x$ranks" all-reduce -b 1K -e 256M -f 2 --seconds 0.05 --world-size "$ranks" \
            --algorithms auto,nccl,nccl_symmetric
        for op in all-reduce reduce-scatter all-gather; do
            modes 100 "host_$(echo "$op" | tr - _)_x$ranks" "$op" -b 8K -e 8K --host --seconds 0.2 \
                --world-size "$ranks" --algorithms auto,nccl
        done
        modes 100 "host_fused_x$ranks" all-reduce-rms-norm --tokens 1 --host --seconds 0.2 \
            --world-size "$ranks" --algorithms auto,nccl
        ;;
    slices_x[248])
        for op in reduce-scatter all-gather; do
            bench 200 "$(echo "$op" | tr - _)_bf16_x$ranks" "$op" -b 8K -e 64M -f 8 --seconds 0.04 --world-size "$ranks"
        done
        ;;
    fused_x[248])
        modes 200 "fused_bf16_x$ranks" all-reduce-rms-norm --tokens 1,2,4,8,16,32,64,128,256,512 --seconds 0.03 \
            --world-size "$ranks" --algorithms one_shot,two_shot,unfused,plain_one_shot,plain_two_shot,fp8_dynamic,nccl
        ;;
    tune_x[248])
        tune 290 "nvidia_h200_x$ranks" --op all_reduce -d bfloat16,float32 --seconds 0.3 --world-size "$ranks"
        tune 290 "nvidia_h200_x$ranks" --op reduce_scatter,all_gather -d bfloat16 --seconds 0.3 --world-size "$ranks"
        ;;
    tune_sms_x[24]) # rows of calls that are given a number of SMs
        tune 580 "nvidia_h200_x$ranks" --op all_reduce,reduce_scatter,all_gather -d bfloat16 -b 1M -e 512M \
            --sms 16,24,32 --seconds 0.3 --world-size "$ranks"
        ;;
    launches_x[248]) # every launch of small sums, fused and plain
        script 590 "$part" research/launch_sweep.py --world-size "$ranks" --json "$out/$part.json"
        ;;
    calibrate_x[12]) # kernels and host of a GPU, then the calibration; with two, sums as well. FOLDER may have results of sums
        script 590 "$part" research/calibrate_gpu.py "$out" --measure --world-size "$ranks" --output "$out/calibration.json" \
            --cluster "$out/cluster.yaml"
        ;;
    engine_8b_x1) engine 300 engine_8b_x1 8b 1x1 1,4,16,64,256,512 auto ;;
    engine_70b_x1) engine 500 engine_70b_x1 70b 1x1 1,64,256,512 auto --quantization fp8 ;;
    engine_70b_half_x1) engine 300 engine_70b_half_x1 70b:40 1x1 1,64,256 auto --quantization fp8 ;; # what 80 GB have room for
    engine_405b_x1) engine 590 engine_405b_x1 405b:31 1x1 1,64,256,512 auto --quantization fp8 ;; # a quarter of the layers
    profile_x1) # kernels of steps by name
        script 120 profile_8b research/engine_profile.py --model random:llama-3.1-8b --json "$out/profile_8b.json"
        script 150 profile_70b research/engine_profile.py --model random:llama-3.1-70b:20 --json "$out/profile_70b.json"
        ;;
    engine_8b) engine 200 engine_8b 8b 4x1 1,64 auto,nccl ;;
    engine_70b) engine 300 engine_70b 70b 4x1 1,64,256 auto,nccl ;;
    engine_405b) engine 400 engine_405b 405b 4x1 1,64 auto,nccl --quantization fp8 ;;
    engine_8b_x2) engine 200 engine_8b_x2 8b 2x1,1x2 1,64 auto,nccl ;;
    engine_70b_x2) engine 500 engine_70b_x2 70b 2x1,1x2 1,64,256 auto ;;
    # half the layers on two GPUs: the load of each of four GPUs
    engine_70b_half) engine 500 engine_70b_half 70b:40 2x1,1x2 32,128,512 auto ;;
    engine_405b_half) engine 590 engine_405b_half 405b:63 2x1,1x2 32,128,256 auto --quantization fp8 ;;
    engine_8b_x4) engine 590 engine_8b_x4 8b 4x1,2x2,1x4 1,64,256,512 auto ;;
    engine_70b_x4) engine 590 engine_70b_x4 70b 4x1,2x2,1x4 1,64,256,512 auto ;;
    engine_405b_4x1 | engine_405b_2x2 | engine_405b_1x4)
        engine 590 "$part" 405b "${part##*_}" 1,64,256,512 auto --quantization fp8
        ;;
    engine_8b_x8) engine 300 engine_8b_x8 8b 8x1 1,64,256,512 auto ;;
    engine_70b_x8) engine 400 engine_70b_x8 70b 8x1 1,64,256,512 auto ;;
    engine_405b_8x1 | engine_405b_4x2 | engine_405b_2x4 | engine_405b_1x8) # one sequence and many, of published lengths
        engine 590 "$part" 405b "${part##*_}" 1,64,512 auto --quantization fp8 --prompt 2048
        ;;
    nodes_engine_x4) # tensor-parallel ranks on two logical nodes of two GPUs: by stores, then by NVSHMEM's puts
        export SHOTCAST_RANKS_PER_NODE=2
        engine 290 nodes_engine_stores_x4 8b 4x1 1,64 auto
        SHOTCAST_NETWORK=nvshmem engine 290 nodes_engine_puts_x4 8b 4x1 1,64 auto
        unset SHOTCAST_RANKS_PER_NODE
        ;;
    peers_x[248]) # beside NCCL, SGLang and FlashInfer in turns; LD_PRELOAD brings another NCCL
        script 590 "$part" -m torch.distributed.run --nproc-per-node "$ranks" research/peer_turns.py --json "$out/$part.json"
        ;;
    tests_cuda_x[248]) # four processes at once, as most of the time is spent on compiling
        tests 400 "cuda_a_x$ranks" "$plain::test_numerics[$ranks]" "$plain::test_graphs_replay_on_changed_inputs[$ranks]" \
            "$plain::test_two_streams[$ranks]" "$plain::test_repeated_calls_are_prepared[$ranks]" \
            "$plain::test_epochs_across_borders[$ranks]" &
        tests 400 "cuda_b_x$ranks" "$plain::test_matrix[0-$ranks]" "$plain::test_matrix[1-$ranks]" &
        tests 400 "cuda_c_x$ranks" "$plain::test_ten_thousand_calls_of_changing_size_with_stragglers[$ranks]" \
            "$plain::test_messages_wait_in_the_mailbox[$ranks]" &
        tests 400 "cuda_d_x$ranks" "$plain::test_graphs_go_on_in_the_workspace_that_they_were_captured_with[$ranks]" \
            "$plain::test_eager_calls_around_a_capture[$ranks]" "$plain::test_written_tensors_and_autograd[$ranks]" &
        wait
        tests 190 "cuda_e_x$ranks" "$plain" -k "[$ranks and (killed or late or mismatch)"
        ;;
    tests_fused_x[248])
        tests 300 "fused_a_x$ranks" "$fused" -k "[$ranks and values and all_reduce" &
        tests 300 "fused_b_x$ranks" "$fused" -k "[$ranks and values and not all_reduce and not all_gather" &
        tests 300 "fused_c_x$ranks" "$fused" -k "[$ranks and values and all_gather" &
        tests 300 "fused_d_x$ranks" "$fused" -k "[$ranks and (sentinels or given or graphs or bits or layer or weights)" &
        wait
        for dtype in float32 float16 bfloat16; do # last, when most of their kernels are compiled
            tests 290 "fused_e_${dtype}_x$ranks" "$fused" -k "[$ranks and two_thousand and -$dtype" &
        done
        tests 290 "fused_f_x$ranks" "$fused" -k "[$ranks and (killed or late or mismatch)" &
        wait
        ;;
    # calls that NCCL serves, with their deadlines
    tests_vendor_x2) tests 400 "$part" tests/collectives/test_vendor_cuda.py -k "not [4" ;;
    tests_vendor_x4) tests 400 "$part" tests/collectives/test_vendor_cuda.py -k "[4" ;;
    tests_operations_x[248]) # random programs on two streams, graphs of calls with a root, and parts of any sizes
        tests 390 "$part" tests/collectives/test_cuda_operations.py -k "[$ranks"
        tests 200 "tests_uneven_x$ranks" tests/collectives/test_uneven.py -k "[$ranks] or -$ranks]"
        ;;
    tests_compile_x[248]) tests 590 "$part" tests/collectives/test_cuda_compile.py -k "[$ranks] or -$ranks]" ;;
    tests_engine_x2) tests 590 "$part" tests/engine/test_llm_cuda.py -k "not [4- and not [2-2" ;;
    tests_engine_x4) tests 590 "$part" tests/engine/test_llm_cuda.py -k "[4- or [2-2" ;;
    tests_engine_nodes_x[24]) # tokens of ranks on two logical nodes are those of Transformers: by stores, then by puts
        export SHOTCAST_RANKS_PER_NODE=$((ranks / 2))
        tests 295 "tests_engine_stores_x$ranks" tests/engine/test_llm_cuda.py -k "[$ranks-"
        SHOTCAST_NETWORK=nvshmem tests 295 "tests_engine_puts_x$ranks" tests/engine/test_llm_cuda.py -k "[$ranks-"
        unset SHOTCAST_RANKS_PER_NODE
        ;;
    faults) # the fault matrix on two GPUs
        export FAULT_MATRIX_JSON="$out/fault_matrix.json"
        tests 590 faults tests/collectives/test_fault_matrix_cuda.py -k "not [4"
        unset FAULT_MATRIX_JSON
        ;;
    faults_own_x4 | faults_vendor_x4) # its cells on four
        export FAULT_MATRIX_JSON="$out/$part.json"
        path=${part#faults_}
        tests 590 "$part" tests/collectives/test_fault_matrix_cuda.py -k "[4-${path%_x4}"
        unset FAULT_MATRIX_JSON
        ;;
    faults_cpu) # the same on CPU ranks
        export FAULT_MATRIX_JSON="$out/fault_matrix.json"
        tests 3600 faults_cpu -m full -k "every or draws" tests/collectives/test_fault_matrix.py
        unset FAULT_MATRIX_JSON
        ;;
    fuzz) # bodies of requests, against the HTTP server with a scripted engine
        export SERVER_FUZZ_JSON="$out/server_fuzz.json"
        tests 3600 fuzz -m "full or not full" --hypothesis-seed=1 tests/server/test_fuzz.py
        unset SERVER_FUZZ_JSON
        ;;
    hosts) # simulated hosts against Gloo; as root, on CPUs
        over="all-reduce -b 4K -e 16M -f 4 --seconds 1"
        on_hosts 900 hosts_8_1ms --hosts 8 --delay-us 1000 $over
        on_hosts 900 hosts_8_10ms --hosts 8 --delay-us 10000 $over
        on_hosts 600 hosts_4_1ms --hosts 4 --delay-us 1000 $over
        for hosts in 2 4 8; do
            on_hosts 300 hosts_${hosts}_5ms_2gbit --hosts $hosts --delay-us 5000 --bandwidth-gbps 2 \
                all-reduce -b 4K -e 1M -f 4 --seconds 0.4
        done
        on_hosts 600 hosts_2x4_1ms --hosts 2 --ranks-per-host 4 --delay-us 1000 $over
        ;;
    operations_cpu) # every operation between CPU ranks beside Gloo, then other reductions and dtypes
        for op in all-reduce reduce-scatter all-gather all-to-all broadcast reduce gather scatter; do
            bench 300 "operations_$op" "$op" --device cpu -g 2,4 -b 64 -e 16M -f 16 --seconds 0.2 --algorithms auto,gloo
        done
        for kind in max/float32 prod/float32 sum/bfloat16 sum/float64 sum/int32 max/int8 min/int64; do
            bench 300 "operations_all-reduce_$(echo "$kind" | tr / _)" all-reduce -o "${kind%/*}" -d "${kind#*/}" --device cpu \
                -g 2 -b 64 -e 16M -f 16 --seconds 0.2 --algorithms auto,gloo
        done
        ;;
    operations_x[248]) # the same between GPUs beside NCCL
        for op in all-to-all broadcast reduce gather scatter; do
            bench 115 "operations_${op}_x$ranks" "$op" -b 64 -e 256M -f 16 --seconds 0.05 \
                --world-size "$ranks" --algorithms auto,nccl
        done
        ;;
    reductions_x[24])
        for kind in max/float32 avg/bfloat16 prod/float32 sum/float64 sum/int32 max/int8 min/int64; do
            bench 80 "operations_all-reduce_$(echo "$kind" | tr / _)_x$ranks" all-reduce -o "${kind%/*}" -d "${kind#*/}" \
                -b 64 -e 256M -f 16 --seconds 0.05 --world-size "$ranks" --algorithms auto,nccl
        done
        ;;
    stress_x[248]) # calls of another seed, each block replayed from a graph, added to the runs so far; it compiles first
        kept=benchmarks/data/h200/stress.json
        [ -f "$out/stress.json" ] || [ ! -f "$kept" ] || cp "$kept" "$out/stress.json"
        script 595 "$part" research/stress.py --device cuda --world-size "$ranks" --minutes 9 --replays 200 \
            --timeout 10 --json "$out/stress.json"
        ;;
    sanitizer_*) # two ranks, which take turns where there is one GPU; the first command compiles
        share=""
        [ "$(nvidia-smi -L 2>/dev/null | grep -c "^GPU")" = 1 ] && share=--share-gpu
        script 280 "${part}_compiled" research/sanitize.py --tool none --limit 270 $share
        script 310 "$part" research/sanitize.py --tool "${part#sanitizer_}" --limit 300 $share
        ;;
    headers_x[24]) # against headers of one word: first, where git is, sh research/earlier_sources.sh 87a944a
        ranks=${part#headers_x}
        before="research/compare_sources.py --before earlier/87a944a/src --rounds 5 --most 2"
        script 300 "headers_x$ranks" $before --json "$out/headers_x$ranks.json" -- all-reduce --device cuda -b 1K -e 64K -f 8 \
            --seconds 0.2 --algorithms one_shot,two_shot --world-size "$ranks"
        script 250 "headers_host_x$ranks" $before --json "$out/headers_host_x$ranks.json" -- all-reduce --device cuda --host \
            -b 8K -e 8K --seconds 0.2 --algorithms one_shot,two_shot --world-size "$ranks"
        ;;
    tests_stores_[24]x[12]) # sums over logical nodes of GPUs, nodes x ranks of each, by stores
        shape=${part##*_}
        SHOTCAST_SHARE_GPUS=$(shared $((${shape%x*} * ranks))) tests 590 "$part" \
            tests/collectives/test_cuda_nodes.py -k "[${shape%x*}-$ranks"
        ;;
    tests_puts_2x1) # the same by NVSHMEM's puts, and all that needs no more than two ranks
        tests 590 "$part" -m "gpu and (full or not full)" tests/collectives/test_cuda_puts.py \
            -k "not [2-2 and not [3- and not [4-"
        ;;
    tests_puts_[24]x[12])
        shape=${part##*_}
        tests 590 "$part" tests/collectives/test_cuda_puts.py -k "[${shape%x*}-$ranks"
        ;;
    nvrar_[24]x[124]) # nodes x GPUs of each, beside separate launches, one node and NCCL
        shape=${part#nvrar_}
        script 590 "$part" research/nvrar_nodes.py --nodes "${shape%x*}" --ranks-per-node "$ranks" \
            --json "$out/$part.json"
        ;;
    tests_overlap) # races on one GPU, bits on two
        tests 400 overlap tests/overlap/test_overlap_cuda.py
        SHOTCAST_SHARE_GPUS=$(shared 2) tests 180 overlap_bench research/tests/test_overlap_forms_cuda.py
        ;;
    tests_prefill_overlap) # prompts in halves: on one GPU too
        SHOTCAST_SHARE_GPUS=$(shared 2) tests 400 prefill_overlap tests/engine/test_prefill_overlap_cuda.py
        ;;
    prefill_x[24]) # a prompt of 4K tokens of a 70B-shaped model, as a whole and in halves, beside NCCL
        script 590 "$part" research/prefill.py --world-size "$ranks" --json "$out/$part.json"
        ;;
    overlap_all_reduce_x[24] | overlap_all_gather_x[24] | overlap_all_to_all_x[24]) # balanced chains, with every peer
        op=${part#overlap_} op=${op%_x*}
        overlap 590 "$op" --op "$(echo "$op" | tr _ -)" --plot "$out/$part.png"
        ;;
    overlap_reduce_scatter_x[24]) # the same, alone and followed by the all-gather
        overlap 290 reduce_scatter --op reduce-scatter --plot "$out/$part.png"
        overlap 290 reduce_scatter_all_gather --op reduce-scatter-all-gather
        ;;
    overlap_bound_x[24]) # messages of a third of the products' time, and a product that waits for its weights
        overlap 290 compute_bound --op all-reduce --ratio 0.333
        overlap 290 memory_bound --op all-reduce --gemm 16x57344x8192 --steps 32
        ;;
    overlap_scattered_x[24]) # messages that are whole matrices of products: projections of a 70B model on so many ranks
        own=$((8192 / ranks)) ffn=$((28672 / ranks))
        overlap 590 scattered --whole --rounds 3 --seconds 0.05 --op reduce-scatter \
            --gemm "2048x8192x$own,4096x8192x$own,8192x8192x$own,2048x8192x$ffn,4096x8192x$ffn,8192x8192x$ffn"
        ;;
    overlap_gathered_x[24]) # the same of the other projections
        own=$((10240 / ranks)) ffn=$((57344 / ranks))
        overlap 590 gathered --whole --rounds 3 --seconds 0.05 --op all-gather \
            --gemm "2048x${own}x8192,4096x${own}x8192,8192x${own}x8192,2048x${ffn}x8192,4096x${ffn}x8192,8192x${ffn}x8192"
        ;;
    training_x[24]) # four layers of an 8B model: gradients in buckets, and divided layers
        script 590 "$part" research/training.py --world-size "$ranks" --json "$out/$part.json"
        ;;
    overlap_published_x[24]) # the grid of arXiv 2606.09200: small tiles, blocks of an SM, priorities
        sets=published quick="--size 896M --steps 4 --rounds 3 --seconds 0.05"
        for op in all-reduce all-to-all; do
            overlap 140 "published_${op}_square" $quick --op "$op"
            overlap 150 "published_${op}_wide" $quick --op "$op" --gemm 8192x57344x8192
        done
        sets=
        ;;
    tests_few_sms_x[248]) # calls that keep to a number of SMs: on one GPU too
        SHOTCAST_SHARE_GPUS=$(shared "$ranks") tests 590 "$part" \
            tests/collectives/test_cuda_few_sms.py -k "[$ranks] or -$ranks]"
        ;;
    few_sms_x[24]) # 4 to 64 SMs beside all of them, and NCCL
        script 590 "$part" research/few_sms.py --world-size "$ranks" --json "$out/$part.json"
        ;;
    few_sms_launches_x[24]) # other launches of one operation
        script 590 "$part" research/few_sms.py --world-size "$ranks" --ops all_reduce --sizes 448M --launches \
            --json "$out/$part.json"
        ;;
    sm_wires_x2) # GB/s that a few SMs move, by each mechanism
        script 420 "$part" research/sm_wires.py --seconds 360 --json "$out/$part.json"
        ;;
    shared_calls_x2) # shared and exclusive communicators beside NCCL, and products beside a call that waits
        script 590 "$part" research/shared_calls.py --json "$out/$part.json"
        ;;
    nccl_memory_x2) script 200 "$part" research/nccl_memory.py ;; # on GPUs that nobody else uses
    programs_x2) # random legal programs of torch.distributed
        for seed in 1 2 3; do
            script 590 "${part}_$seed" research/legal_programs.py --device cuda --world-size 2 --programs 1000 --seconds 480 \
                --seed "$seed" --json "$out/${part}_$seed.json" &
        done
        wait
        ;;
    tests_progress_x2) # what goes on beside a call that waits
        tests 590 "$part" tests/process_group/test_cuda_progress.py tests/collectives/test_cuda_waits.py \
            tests/collectives/test_dropped.py
        ;;
    overlap_hosts) # chains of CPU ranks on two simulated hosts, 5 ms apart, and on one; as root
        chain=research/bench_overlap.py
        script 300 overlap_hosts $chain --hosts 2 --delay-us 5000 --size 4K,64K,256K --plot "$out/overlap_hosts.png" \
            --json "$out/overlap_hosts.json"
        script 300 overlap_hosts_lanes $chain --hosts 2 --delay-us 5000 --size 4K --repeat 8 --lanes 3 \
            --json "$out/overlap_hosts_lanes.json"
        script 300 overlap_one_host $chain --device cpu --world-size 2 --size 4K,64K,1M --json "$out/overlap_one_host.json"
        ;;
    products_x1) # large products that leave room, beside the library's, on one GPU
        script 300 shaped_products research/shaped_products.py --set tune --json "$out/shaped_products.json"
        ;;
    tests_products) tests 300 products research/tests/test_large_gemm_cuda.py research/tests/test_matmuls_cuda.py \
        tests/overlap/test_leave_sms_cuda.py \
        research/tests/test_product_room_cuda.py ;;
    frameworks_cpu) # training and generating by the backend of torch.distributed, beside Gloo
        script 3000 frameworks_cpu research/frameworks.py --rounds 5 --json "$out/frameworks.json"
        ;;
    frameworks_x[24]) # training on GPUs, beside NCCL
        script 590 "$part" research/frameworks.py --device cuda --world-size "$ranks" --rounds 3 \
            --scripts ddp,zero,fsdp2,dtensor --json "$out/$part.json"
        ;;
    generation_x[24]) # compiled calls and tensor-parallel Transformers on GPUs, beside NCCL
        script 590 "$part" research/frameworks.py --device cuda --world-size "$ranks" --rounds 3 \
            --scripts functional_collectives,transformers_generate --json "$out/$part.json"
        ;;
    process_group_cpu) # calls of torch.distributed by our backend, beside the communicator's and Gloo's
        script 600 process_group_cpu research/process_group.py --json "$out/process_group.json"
        ;;
    process_group_x[24]) # the same on GPUs, eager and captured, beside NCCL's
        script 590 "$part" research/process_group.py --device cuda --world-size "$ranks" --json "$out/$part.json"
        ;;
    # calls, messages, graphs and faults of the backend of torch.distributed, and scripts by it
    tests_process_group_x2) tests 590 "$part" tests/process_group/test_cuda_group.py -k "not 4]" ;;
    tests_process_group_x4) tests 590 "$part" tests/process_group/test_cuda_group.py -k "4]" ;;
    tests_frameworks) tests 590 frameworks tests/process_group/test_frameworks_cuda.py ;;
    tests_integrations) # plug-ins of vLLM and SGLang, batches of every size, and ranks that see one GPU each
        tests 590 integrations tests/integrations/test_cuda_plugins.py tests/collectives/test_cuda_visible.py \
            tests/collectives/test_batch_invariant.py
        ;;
    vllm_x2) # vLLM's engine with and without the plug-in, where it can be imported
        script 590 "$part" research/vllm_engines.py --fault stop --logs "$out" --json "$out/$part.json"
        ;;
    vllm_turns_x2) # our engine beside vLLM's, where it can be imported
        script 590 "$part" research/engine_turns.py --logs "$out" --json "$out/$part.json"
        ;;
    torch_suite_x[24]) # PyTorch's own suite on GPUs, by our backend and by NCCL's
        for backend in shotcast nccl; do
            script 295 "torch_suite_${backend}_x$ranks" tests/process_group/torch_suite.py --device cuda --backend "$backend" \
                --world-size "$ranks" --out "$out/$part.json"
        done
        ;;
    served_trace) # kernels of a CPU rank alone, then a trace that the engine serves in real time
        script 600 calibrate_cpu_x1 -m shotcast calibrate --output "$out/calibration_x1.json" --cluster "$out/cluster_x1.yaml"
        script 600 served_trace research/served_trace.py --record "$out/served_trace.json"
        ;;
    *)
        echo "no part $part; parts: $parts" >&2
        exit 2
        ;;
    esac
done
