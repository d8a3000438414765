// The API server of custom resources alone, without users: for tests on the loopback address.
package main

import (
	"context"
	"flag"
	"os"

	"github.com/spf13/pflag"
	extensionsapiserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	"k8s.io/apiextensions-apiserver/pkg/cmd/server/options"
	generatedopenapi "k8s.io/apiextensions-apiserver/pkg/generated/openapi"
	openapinamer "k8s.io/apiserver/pkg/endpoints/openapi"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/util/openapi"
	"k8s.io/klog/v2"
)

func main() {
	klog.InitFlags(flag.CommandLine)
	fs := pflag.NewFlagSet("crds", pflag.ExitOnError)
	fs.AddGoFlagSet(flag.CommandLine)
	s := options.NewCustomResourceDefinitionsServerOptions(os.Stdout, os.Stderr)
	s.AddFlags(fs)
	s.RecommendedOptions.Authentication = nil
	s.RecommendedOptions.Authorization = nil
	s.RecommendedOptions.Admission = nil
	s.APIEnablement.RuntimeConfig.Set("api/all=true")
	fs.Parse(os.Args[1:])
	check(s.Complete())
	config, err := s.Config()
	check(err)
	defs := openapi.GetOpenAPIDefinitionsWithoutDisabledFeatures(generatedopenapi.GetOpenAPIDefinitions)
	config.GenericConfig.OpenAPIConfig = genericapiserver.DefaultOpenAPIConfig(defs, openapinamer.NewDefinitionNamer(extensionsapiserver.Scheme))
	completed := config.Complete()
	server, err := completed.New(genericapiserver.NewEmptyDelegate())
	check(err)
	check(server.GenericAPIServer.PrepareRun().RunWithContext(context.Background()))
}

func check(err error) {
	if err != nil {
		klog.Fatal(err)
	}
}
