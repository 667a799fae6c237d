# bash completion for ftrun. Made by `ftrun completions bash`: do not edit, a test compares the two.
# Use: source this file, or copy it to ~/.local/share/bash-completion/completions/ftrun

_ftrun_runs() {
    sh -c '
    if [ -n "$FTRUN_RUNS_ROOT" ]; then root=$FTRUN_RUNS_ROOT
    elif [ -n "$XDG_RUNTIME_DIR" ] && [ -w "$XDG_RUNTIME_DIR" ]; then root=$XDG_RUNTIME_DIR/ftrun
    elif [ -w /dev/shm ]; then root=/dev/shm/ftrun-$(id -u)
    else root=/tmp/ftrun-$(id -u); fi
    cd "$root" 2>/dev/null || exit 0
    for run in *; do
        pid=$(sed -n "s/^{[^{}]*\"pid\": \([0-9]*\).*/\1/p" "$run/run.json" 2>/dev/null)
        [ -n "$pid" ] && [ -d "/proc/$pid" ] && echo "$run"
    done
'
}

_ftrun_options() {
    case $1 in
        completions) echo '--help' ;;
        doctor) echo '--help --rdzv-endpoint --json' ;;
        drain) echo '--help --rank --node --wait --yes --json' ;;
        events) echo '--help --follow --json' ;;
        explain) echo '--help' ;;
        inject-fault) echo '--help --rank --at --step --epoch --after --for --wait --yes --random --seed --json' ;;
        metrics) echo '--help --file --port --interval --json' ;;
        run) echo '--help --spares --max-replacements --spare-nodes --node-loss --max-node-replacements --snapshot-every --on-exhausted --xid-policy --quarantine-file --heartbeat-interval --heartbeat-timeout --hang-timeout --hang-floor --hang-ceiling --nonfinite --check-every --inexact --stop-timeout --recover-timeout --start-timeout --fault-plan --random-faults --fault-seed --run-id --config --debug-rank --metrics-file --metrics-port --dry-run --json --log-format --log-prefix --keep-logs --forward-signals --worker-start --version --nproc-per-node --max-restarts --module --no-python --run-path --virtual-local-rank --numa-binding --signals-to-handle --shutdown-timeout --role --log-dir --redirects --tee --log-line-prefix-template --local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters --print-completion --nnodes --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --standalone --node-rank --master-addr --master-port --local-addr --monitor-interval --start-method --event-log-handler --logs-specs' ;;
        runs) echo '--help --all --json' ;;
        status) echo '--help --once --interval --json' ;;
        stop) echo '--help --wait --yes' ;;
        timeline) echo '--help --incident --format --output --json' ;;
        verify) echo '--help --faults --kill-every-phase --json --spares --max-replacements --spare-nodes --node-loss --max-node-replacements --snapshot-every --on-exhausted --xid-policy --quarantine-file --heartbeat-interval --heartbeat-timeout --hang-timeout --hang-floor --hang-ceiling --nonfinite --check-every --inexact --stop-timeout --recover-timeout --start-timeout --random-faults --fault-seed --run-id --config --debug-rank --metrics-file --metrics-port --log-format --log-prefix --keep-logs --forward-signals --worker-start --nproc-per-node --max-restarts --module --no-python --run-path --virtual-local-rank --numa-binding --signals-to-handle --shutdown-timeout --role --log-dir --redirects --tee --log-line-prefix-template --local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters --nnodes --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --standalone --node-rank --master-addr --master-port --local-addr --monitor-interval --start-method --event-log-handler --logs-specs' ;;
    esac
}

# what the option $2 of command $1 takes: nothing at all for a flag
_ftrun_value() {
    case "$1 $2" in
        'doctor --rdzv-endpoint' | 'doctor --rdzv_endpoint') echo 'place' ;;
        'drain --rank') echo 'other' ;;
        'drain --node') echo 'other' ;;
        'drain --wait') echo 'other' ;;
        'inject-fault --rank') echo 'other' ;;
        'inject-fault --at') echo 'words forward backward gate update idle stop reset restore' ;;
        'inject-fault --step') echo 'other' ;;
        'inject-fault --epoch') echo 'other' ;;
        'inject-fault --after') echo 'other' ;;
        'inject-fault --for') echo 'other' ;;
        'inject-fault --wait') echo 'other' ;;
        'inject-fault --random') echo 'other' ;;
        'inject-fault --seed') echo 'other' ;;
        'metrics --file') echo 'file' ;;
        'metrics --port') echo 'other' ;;
        'metrics --interval') echo 'other' ;;
        'run --spares') echo 'other' ;;
        'run --max-replacements' | 'run --max_replacements') echo 'other' ;;
        'run --spare-nodes' | 'run --spare_nodes') echo 'other' ;;
        'run --node-loss' | 'run --node_loss') echo 'words restart repair' ;;
        'run --max-node-replacements' | 'run --max_node_replacements') echo 'other' ;;
        'run --snapshot-every' | 'run --snapshot_every') echo 'other' ;;
        'run --on-exhausted' | 'run --on_exhausted') echo 'words fail shrink wait' ;;
        'run --xid-policy' | 'run --xid_policy') echo 'file' ;;
        'run --quarantine-file' | 'run --quarantine_file') echo 'file' ;;
        'run --heartbeat-interval' | 'run --heartbeat_interval') echo 'other' ;;
        'run --heartbeat-timeout' | 'run --heartbeat_timeout') echo 'other' ;;
        'run --hang-timeout' | 'run --hang_timeout') echo 'words auto' ;;
        'run --hang-floor' | 'run --hang_floor') echo 'other' ;;
        'run --hang-ceiling' | 'run --hang_ceiling') echo 'other' ;;
        'run --nonfinite') echo 'words redo stop ignore' ;;
        'run --check-every' | 'run --check_every') echo 'other' ;;
        'run --inexact') echo 'words go-on stop' ;;
        'run --stop-timeout' | 'run --stop_timeout') echo 'other' ;;
        'run --recover-timeout' | 'run --recover_timeout') echo 'other' ;;
        'run --start-timeout' | 'run --start_timeout') echo 'other' ;;
        'run --fault-plan' | 'run --fault_plan') echo 'file' ;;
        'run --random-faults' | 'run --random_faults') echo 'other' ;;
        'run --fault-seed' | 'run --fault_seed') echo 'other' ;;
        'run --run-id' | 'run --run_id') echo 'other' ;;
        'run --config') echo 'file' ;;
        'run --debug-rank' | 'run --debug_rank') echo 'other' ;;
        'run --metrics-file' | 'run --metrics_file') echo 'file' ;;
        'run --metrics-port' | 'run --metrics_port') echo 'other' ;;
        'run --log-format' | 'run --log_format') echo 'words text json' ;;
        'run --log-prefix' | 'run --log_prefix') echo 'other' ;;
        'run --keep-logs' | 'run --keep_logs') echo 'words all' ;;
        'run --forward-signals' | 'run --forward_signals') echo 'other' ;;
        'run --worker-start' | 'run --worker_start') echo 'words forkserver exec' ;;
        'run --nproc-per-node' | 'run --nproc_per_node') echo 'words auto gpu cpu xpu' ;;
        'run --max-restarts' | 'run --max_restarts') echo 'other' ;;
        'run --numa-binding' | 'run --numa_binding') echo 'words node socket exclusive core-complex' ;;
        'run --signals-to-handle' | 'run --signals_to_handle') echo 'other' ;;
        'run --shutdown-timeout' | 'run --shutdown_timeout') echo 'other' ;;
        'run --role') echo 'other' ;;
        'run --log-dir' | 'run --log_dir') echo 'folder' ;;
        'run -r' | 'run --redirects') echo 'other' ;;
        'run -t' | 'run --tee') echo 'other' ;;
        'run --log-line-prefix-template' | 'run --log_line_prefix_template') echo 'other' ;;
        'run --local-ranks-filter' | 'run --local_ranks_filter') echo 'other' ;;
        'run --duplicate-stdout-filters' | 'run --duplicate_stdout_filters') echo 'other' ;;
        'run --duplicate-stderr-filters' | 'run --duplicate_stderr_filters') echo 'other' ;;
        'run --print-completion' | 'run --print_completion') echo 'words bash zsh fish' ;;
        'run --nnodes') echo 'other' ;;
        'run --rdzv-backend' | 'run --rdzv_backend') echo 'other' ;;
        'run --rdzv-endpoint' | 'run --rdzv_endpoint') echo 'place' ;;
        'run --rdzv-id' | 'run --rdzv_id') echo 'other' ;;
        'run --rdzv-conf' | 'run --rdzv_conf') echo 'other' ;;
        'run --node-rank' | 'run --node_rank') echo 'other' ;;
        'run --master-addr' | 'run --master_addr') echo 'other' ;;
        'run --master-port' | 'run --master_port') echo 'other' ;;
        'run --local-addr' | 'run --local_addr') echo 'other' ;;
        'run --monitor-interval' | 'run --monitor_interval') echo 'other' ;;
        'run --start-method' | 'run --start_method') echo 'words spawn fork forkserver' ;;
        'run --event-log-handler' | 'run --event_log_handler') echo 'other' ;;
        'run --logs-specs' | 'run --logs_specs') echo 'other' ;;
        'status --interval') echo 'other' ;;
        'stop --wait') echo 'other' ;;
        'timeline --incident') echo 'other' ;;
        'timeline --format') echo 'words text svg html trace' ;;
        'timeline -o' | 'timeline --output') echo 'file' ;;
        'verify --faults') echo 'file' ;;
        'verify --spares') echo 'other' ;;
        'verify --max-replacements' | 'verify --max_replacements') echo 'other' ;;
        'verify --spare-nodes' | 'verify --spare_nodes') echo 'other' ;;
        'verify --node-loss' | 'verify --node_loss') echo 'words restart repair' ;;
        'verify --max-node-replacements' | 'verify --max_node_replacements') echo 'other' ;;
        'verify --snapshot-every' | 'verify --snapshot_every') echo 'other' ;;
        'verify --on-exhausted' | 'verify --on_exhausted') echo 'words fail shrink wait' ;;
        'verify --xid-policy' | 'verify --xid_policy') echo 'file' ;;
        'verify --quarantine-file' | 'verify --quarantine_file') echo 'file' ;;
        'verify --heartbeat-interval' | 'verify --heartbeat_interval') echo 'other' ;;
        'verify --heartbeat-timeout' | 'verify --heartbeat_timeout') echo 'other' ;;
        'verify --hang-timeout' | 'verify --hang_timeout') echo 'words auto' ;;
        'verify --hang-floor' | 'verify --hang_floor') echo 'other' ;;
        'verify --hang-ceiling' | 'verify --hang_ceiling') echo 'other' ;;
        'verify --nonfinite') echo 'words redo stop ignore' ;;
        'verify --check-every' | 'verify --check_every') echo 'other' ;;
        'verify --inexact') echo 'words go-on stop' ;;
        'verify --stop-timeout' | 'verify --stop_timeout') echo 'other' ;;
        'verify --recover-timeout' | 'verify --recover_timeout') echo 'other' ;;
        'verify --start-timeout' | 'verify --start_timeout') echo 'other' ;;
        'verify --random-faults' | 'verify --random_faults') echo 'other' ;;
        'verify --fault-seed' | 'verify --fault_seed') echo 'other' ;;
        'verify --run-id' | 'verify --run_id') echo 'other' ;;
        'verify --config') echo 'file' ;;
        'verify --debug-rank' | 'verify --debug_rank') echo 'other' ;;
        'verify --metrics-file' | 'verify --metrics_file') echo 'file' ;;
        'verify --metrics-port' | 'verify --metrics_port') echo 'other' ;;
        'verify --log-format' | 'verify --log_format') echo 'words text json' ;;
        'verify --log-prefix' | 'verify --log_prefix') echo 'other' ;;
        'verify --keep-logs' | 'verify --keep_logs') echo 'words all' ;;
        'verify --forward-signals' | 'verify --forward_signals') echo 'other' ;;
        'verify --worker-start' | 'verify --worker_start') echo 'words forkserver exec' ;;
        'verify --nproc-per-node' | 'verify --nproc_per_node') echo 'words auto gpu cpu xpu' ;;
        'verify --max-restarts' | 'verify --max_restarts') echo 'other' ;;
        'verify --numa-binding' | 'verify --numa_binding') echo 'words node socket exclusive core-complex' ;;
        'verify --signals-to-handle' | 'verify --signals_to_handle') echo 'other' ;;
        'verify --shutdown-timeout' | 'verify --shutdown_timeout') echo 'other' ;;
        'verify --role') echo 'other' ;;
        'verify --log-dir' | 'verify --log_dir') echo 'folder' ;;
        'verify -r' | 'verify --redirects') echo 'other' ;;
        'verify -t' | 'verify --tee') echo 'other' ;;
        'verify --log-line-prefix-template' | 'verify --log_line_prefix_template') echo 'other' ;;
        'verify --local-ranks-filter' | 'verify --local_ranks_filter') echo 'other' ;;
        'verify --duplicate-stdout-filters' | 'verify --duplicate_stdout_filters') echo 'other' ;;
        'verify --duplicate-stderr-filters' | 'verify --duplicate_stderr_filters') echo 'other' ;;
        'verify --nnodes') echo 'other' ;;
        'verify --rdzv-backend' | 'verify --rdzv_backend') echo 'other' ;;
        'verify --rdzv-endpoint' | 'verify --rdzv_endpoint') echo 'place' ;;
        'verify --rdzv-id' | 'verify --rdzv_id') echo 'other' ;;
        'verify --rdzv-conf' | 'verify --rdzv_conf') echo 'other' ;;
        'verify --node-rank' | 'verify --node_rank') echo 'other' ;;
        'verify --master-addr' | 'verify --master_addr') echo 'other' ;;
        'verify --master-port' | 'verify --master_port') echo 'other' ;;
        'verify --local-addr' | 'verify --local_addr') echo 'other' ;;
        'verify --monitor-interval' | 'verify --monitor_interval') echo 'other' ;;
        'verify --start-method' | 'verify --start_method') echo 'words spawn fork forkserver' ;;
        'verify --event-log-handler' | 'verify --event_log_handler') echo 'other' ;;
        'verify --logs-specs' | 'verify --logs_specs') echo 'other' ;;
    esac
}

# what stands at place $2 (from 0) of command $1
_ftrun_argument() {
    case "$1 $2" in
        'completions 0') printf '%s\n' 'words bash zsh fish' ;;
        'drain 0') printf '%s\n' 'run' ;;
        'events 0') printf '%s\n' 'run' ;;
        'explain 0') printf '%s\n' 'run' ;;
        'inject-fault 0') printf '%s\n' 'words kill term segv abort exit: exception oom freeze hang gil slow: nan bitflip comm xid: gpu-lost ecc launcher-kill node-kill' ;;
        'inject-fault 1') printf '%s\n' 'run' ;;
        'metrics 0') printf '%s\n' 'run' ;;
        'run 0') printf '%s\n' 'script' ;;
        'run 1') printf '%s\n' 'file' ;;
        'status 0') printf '%s\n' 'run' ;;
        'stop 0') printf '%s\n' 'run' ;;
        'timeline 0') printf '%s\n' 'run' ;;
        'verify 0') printf '%s\n' 'script' ;;
        'verify 1') printf '%s\n' 'file' ;;
    esac
}

_ftrun_words() {
    local kind=$1
    case $kind in
        file | script | place) COMPREPLY+=($(compgen -f -- "$cur")); compopt -o filenames 2>/dev/null ;;
        folder) COMPREPLY+=($(compgen -d -- "$cur")); compopt -o filenames 2>/dev/null ;;
        run) COMPREPLY+=($(compgen -W "$(_ftrun_runs)" -- "$cur")) ;;
        words\ *) COMPREPLY+=($(compgen -W "${kind#words }" -- "$cur")) ;;
    esac
}

_ftrun() {
    local cur line command=run first="" place=0 index=1 word kind IFS=$' \t\n'
    COMPREPLY=()
    line=("${COMP_WORDS[@]:0:COMP_CWORD}")
    cur=${COMP_WORDS[COMP_CWORD]}
    # bash takes --name=value for three words
    if [[ $cur == = ]]; then line+=(=) cur=""; fi
    case " completions doctor drain events explain inject-fault metrics run runs status stop timeline verify " in *" ${line[1]-} "*) command=${line[1]} first=yes index=2 ;; esac
    while ((index < ${#line[@]})); do
        word=${line[index]}
        if [[ $word == -* && ! (( $command == run || $command == verify ) && $place -gt 0) ]]; then
            kind=$(_ftrun_value "$command" "$word")
            if [[ -n $kind ]]; then
                [[ ${line[index + 1]-} == = ]] && ((index++))
                if ((index + 1 >= ${#line[@]})); then
                    _ftrun_words "$kind"
                    return
                fi
                ((index++))
            fi
        else
            ((place++))
        fi
        ((index++))
    done
    if [[ ( $command == run || $command == verify ) && $place -gt 0 ]]; then
        _ftrun_words file
        return
    fi
    if [[ $cur == -* ]]; then
        COMPREPLY=($(compgen -W "$(_ftrun_options "$command")" -- "$cur"))
        return
    fi
    [[ -z $first && $place -eq 0 && ${#line[@]} -eq 1 ]] && COMPREPLY=($(compgen -W "completions doctor drain events explain inject-fault metrics run runs status stop timeline verify" -- "$cur"))
    while read -r kind; do _ftrun_words "$kind"; done < <(_ftrun_argument "$command" "$place")
}
complete -F _ftrun ftrun
