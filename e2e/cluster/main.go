// Command kubernetes holds every component of a cluster in one binary, chosen by the first argument, so that
// their shared code is compiled and linked once.
package main

import (
	"context"
	"fmt"
	"os"
	"sort"
	"strings"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubeadm "k8s.io/kubernetes/cmd/kubeadm/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// run adapts a component's cobra command to a plain main.
func run(command func() *cobra.Command) func() {
	return func() { os.Exit(cli.Run(command())) }
}

var components = map[string]func(){
	"etcd":                    func() { etcdmain.Main(os.Args) },
	"kube-apiserver":          run(apiserver.NewAPIServerCommand),
	"kube-controller-manager": run(controllers.NewControllerManagerCommand),
	"kube-scheduler":          run(func() *cobra.Command { return scheduler.NewSchedulerCommand() }),
	"kubelet":                 run(func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) }),
	"kube-proxy":              run(proxy.NewProxyCommand),
	"kubectl":                 run(kubectl.NewDefaultKubectlCommand),
	"kubeadm": func() {
		if err := kubeadm.Run(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	},
	"coredns":   runCoreDNS,
	"oci-image": run(newImageCommand),
}

func main() {
	// Called through a link named after a component, or with its name as the first argument.
	name := os.Args[0][strings.LastIndex(os.Args[0], "/")+1:]
	if _, ok := components[name]; !ok && len(os.Args) > 1 {
		name, os.Args = os.Args[1], os.Args[1:]
	}
	component, ok := components[name]
	if !ok {
		names := make([]string, 0, len(components))
		for known := range components {
			names = append(names, known)
		}
		sort.Strings(names)
		fmt.Fprintf(os.Stderr, "usage: kubernetes %s [flags]\n", strings.Join(names, "|"))
		os.Exit(2)
	}
	component()
}
